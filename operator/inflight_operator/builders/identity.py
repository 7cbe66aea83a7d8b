"""Who the pods are: a ServiceAccount without rights, and the Secret with the run's bearer token."""

from __future__ import annotations

import base64

from inflight_operator import names
from inflight_operator.builders.build import Build, Manifest
from inflight_operator.builders.pods import TOKEN_KEY


def service_account(build: Build) -> Manifest:
    """Of all pods of the job; none of them gets a token for the API server."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": build.metadata(names.account(build.name)),
        "automountServiceAccountToken": False,
    }


def token_secret(build: Build) -> Manifest:
    """The bearer token that every route of the run asks for; made once, and kept."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": build.metadata(names.token(build.name)),
        "type": "Opaque",
        "immutable": True,
        "data": {TOKEN_KEY: base64.b64encode(build.facts.token.encode()).decode()},
    }
