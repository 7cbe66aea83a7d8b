"""The runs' bearer tokens: one Secret per job, made once and kept. The operator may not list Secrets."""

from __future__ import annotations

import base64
import binascii
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from inflight_operator import names
from inflight_operator.builders import Manifest
from inflight_operator.builders.pods import TOKEN_KEY
from inflight_operator.children import belongs_to, going, taken
from inflight_operator.kube import Kube, KubeError
from inflight_operator.lifecycle import Cause
from inflight_operator.refusals import Refusal

TOKEN_BYTES: Final = 32
CHECK_EVERY_S: Final = 300.0
"""Nobody tells us when a Secret is deleted, so one looks from time to time."""


class TokenError(Exception):
    """A job's token cannot be read; the message says why, never what."""


@dataclass(slots=True)
class _Known:
    uid: str
    token: str
    checked: float


class Tokens:
    """Makes and reads the token Secrets.

    Args:
        kube: the API.
        on_write: told of each write: kind and verb.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        kube: Kube,
        on_write: Callable[[str, str], None] = lambda kind, verb: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube = kube
        self._on_write = on_write
        self._clock = clock
        self._known: dict[tuple[str, str], _Known] = {}

    async def ensure(self, manifest: Manifest, uid: str) -> Refusal | None:
        """See to it that a job has its Secret; the answer to a failure is not remembered.

        Args:
            manifest: the Secret as built; its data is replaced.
            uid: of the job.

        Raises:
            KubeError: the API server would not.
        """
        namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
        address = (namespace, name)
        known = self._known.get(address)
        if known is not None and known.uid == uid and self._clock() - known.checked < CHECK_EVERY_S:
            return None
        token = known.token if known is not None and known.uid == uid else ""
        return await self._see_to(manifest, uid, token)

    async def token(self, namespace: str, job: str, fresh: bool = False) -> str:
        """A job's token.

        Raises:
            TokenError: there is none, or it cannot be read.
        """
        address = (namespace, names.token(job))
        known = self._known.get(address)
        if known is not None and not fresh:
            return known.token
        try:
            found = await self._kube.get("Secret", *address)
        except KubeError as error:
            raise TokenError(f"Secret {address[1]}: {error.reason}") from None
        if found is None:
            raise TokenError(f"Secret {address[1]} is not there")
        owners = found["metadata"].get("ownerReferences") or []
        self._keep(address, owners[0]["uid"] if owners else "", found)
        return self._known[address].token

    def forget(self, namespace: str, job: str) -> None:
        """Drop a job's token."""
        address = (namespace, names.token(job))
        self._known.pop(address, None)

    async def delete(self, namespace: str, job: str, uid: str) -> None:
        """Delete a job's Secret, once.

        Raises:
            KubeError: the API server would not.
        """
        name = names.token(job)
        found = await self._kube.get("Secret", namespace, name)
        if found is not None and belongs_to(found, uid):
            await self._kube.delete("Secret", namespace, name, found["metadata"]["uid"])
            self._on_write("Secret", "delete")
        self.forget(namespace, job)

    async def _see_to(self, manifest: Manifest, uid: str, token: str) -> Refusal | None:
        metadata = manifest["metadata"]
        address = (metadata["namespace"], metadata["name"])
        found = await self._kube.get("Secret", *address)
        if found is None:
            text = token or secrets.token_urlsafe(TOKEN_BYTES)
            data = {TOKEN_KEY: base64.b64encode(text.encode()).decode()}
            try:
                found = await self._kube.create({**manifest, "data": data})
                self._on_write("Secret", "create")
            except KubeError as error:
                if not error.exists:
                    raise
                found = await self._kube.get("Secret", *address)
        what = f"Secret {address[1]}"
        if found is None:
            return Refusal(Cause("WaitingForDeletion", f"{what} is just going"), passing=True)
        if (refusal := going(what, found, uid) or taken(what, found, uid)) is not None:
            return refusal
        try:
            self._keep(address, uid, found)
        except TokenError as error:
            return Refusal(Cause("TokenUnreadable", f"{error}; delete it, a new one is made"))
        return None

    def _keep(self, address: tuple[str, str], uid: str, secret: Manifest) -> None:
        try:
            token = base64.b64decode((secret.get("data") or {})[TOKEN_KEY], validate=True).decode()
        except (KeyError, ValueError, binascii.Error):
            raise TokenError(f"Secret {address[1]} holds no {TOKEN_KEY}") from None
        self._known[address] = _Known(uid, token, self._clock())
