"""ConfigMaps: the rendered role configs, and the job's own copy of its environment's code.

Both are immutable and named by their content: a running job keeps what it was started with, a job that is resumed with
another spec gets new ones, and its pods name exactly the one they were made for.
"""

from __future__ import annotations

from inflight_operator import names
from inflight_operator.builders.build import Build, Manifest
from inflight_operator.builders.wiring import Wiring, code_digest


def role_configs(build: Build, wiring: Wiring) -> Manifest:
    """One file per role. No secret stands in them."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": build.metadata(wiring.config_map, names.CONFIG),
        "immutable": True,
        "data": wiring.configs,
    }


def environment_code(build: Build) -> Manifest:
    """Copy of the ConfigMap that the job names, as it was at the start."""
    code = build.facts.code
    manifest: Manifest = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": build.metadata(names.code(build.name, code_digest(build)), names.CODE),
        "immutable": True,
        "data": dict(code.data),
    }
    if code.binary_data:
        manifest["binaryData"] = dict(code.binary_data)
    return manifest
