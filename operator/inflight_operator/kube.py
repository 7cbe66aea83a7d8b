"""The Kubernetes API, as far as the operator needs it: plain dicts in and out, a deadline on every call.

On the official client's asyncio half, below its generated models: these drop fields that they do not know.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, NamedTuple, Self
from urllib.parse import quote
from urllib.request import getproxies_environment

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from aiohttp.connector import Connection
from kubernetes.aio import client as kubernetes_client
from kubernetes.aio import config as kubernetes_config

from inflight_operator.builders import Manifest

FIELD_MANAGER: Final = "inflight-operator"
CALL_DEADLINE_S: Final = 20.0
LIST_PAGE: Final = 100
"""Objects in one answer: more would only take more memory at once."""
APPLY: Final = "application/apply-patch+yaml"  # JSON is YAML
MERGE: Final = "application/merge-patch+json"
JSON: Final = "application/json"
LEASES: Final = "/apis/coordination.k8s.io/"
METADATA_ONLY: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


class Snapshot(NamedTuple):
    """Objects as they were at one moment.

    Attributes:
        items: the objects.
        version: resource version of the list.
    """

    items: list[Manifest]
    version: str


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object, and where the API keeps it.

    Attributes:
        api_version: group and version.
        kind: name of the kind.
        plural: its name in paths.
    """

    api_version: str
    kind: str
    plural: str

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        """Path of a namespace's objects, of one of them, or of a part of it; an empty namespace means all of them."""
        root = f"/api/{self.api_version}" if "/" not in self.api_version else f"/apis/{self.api_version}"
        within = f"/namespaces/{quote(namespace, safe='')}" if namespace else ""
        parts = [self.plural, *([quote(name, safe="")] if name else []), *([subresource] if subresource else [])]
        return f"{root}{within}/{'/'.join(parts)}"


KINDS: Final = {
    kind.kind: kind
    for kind in (
        Kind("inflight.dev/v1alpha1", "RLTrainingJob", "rltrainingjobs"),
        Kind("jobset.x-k8s.io/v1alpha2", "JobSet", "jobsets"),
        Kind("apps/v1", "StatefulSet", "statefulsets"),
        Kind("apps/v1", "Deployment", "deployments"),
        Kind("batch/v1", "Job", "jobs"),
        Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
        Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
        Kind("coordination.k8s.io/v1", "Lease", "leases"),
        Kind("v1", "ConfigMap", "configmaps"),
        Kind("v1", "Event", "events"),
        Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims"),
        Kind("v1", "Pod", "pods"),
        Kind("v1", "Secret", "secrets"),
        Kind("v1", "Service", "services"),
        Kind("v1", "ServiceAccount", "serviceaccounts"),
    )
}
"""All kinds that the operator reads or writes."""


class KubeError(Exception):
    """A call that did not succeed.

    Attributes:
        status: HTTP status; 0 when there was no answer.
        reason: the API's word for it (``AlreadyExists``, ``Forbidden``, ...), or ``Unreachable``.
        message: the server's own sentence.
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}" if message else reason)
        self.status = status
        self.reason = reason
        self.message = message

    @property
    def missing(self) -> bool:
        """There is no such object (or no such kind)."""
        return self.status == 404

    @property
    def exists(self) -> bool:
        """An object of this name is there already."""
        return self.status == 409 and self.reason == "AlreadyExists"

    @property
    def passing(self) -> bool:
        """Worth trying again soon, and nobody's mistake: no answer, an overloaded server, a write that came between."""
        return self.status in (0, 429) or self.status >= 500 or (self.status == 409 and not self.exists)


class Kube:
    """A connection to the API server, with this process's own credentials.

    All methods raise :class:`KubeError` unless they say otherwise.
    """

    def __init__(self, configuration: kubernetes_client.Configuration, deadline_s: float = CALL_DEADLINE_S) -> None:
        configuration.client_session_kwargs = {
            "request_class": _checked(self),
            # Else each request looks for a .netrc and for proxies.
            "trust_env": bool(getproxies_environment()),
        }
        self._api: Any = kubernetes_client.ApiClient(configuration)  # its methods have no types
        self._deadline_s = deadline_s
        self.before_write: Callable[[], None] = lambda: None
        """Called when nothing is left to wait for before a write's bytes leave, those to Leases apart; what it raises
        stops the write."""

    @classmethod
    async def connect(cls, kubeconfig: str = "", deadline_s: float = CALL_DEADLINE_S) -> Self:
        """Connect as the pod's service account, or as a kubeconfig file says.

        Raises:
            kubernetes.aio.config.ConfigException: there are no credentials.
        """
        configuration = kubernetes_client.Configuration()
        loaders: Any = kubernetes_config
        if kubeconfig:
            await loaders.load_kube_config(kubeconfig, client_configuration=configuration)
        else:
            loaders.load_incluster_config(client_configuration=configuration)
        return cls(configuration, deadline_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._api.close()

    async def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        """Read an object; ``None`` when it is not there."""
        try:
            return await self._call("GET", KINDS[kind].path(namespace, name))
        except KubeError as error:
            if error.missing:
                return None
            raise

    async def list(self, kind: str, namespace: str, selector: str = "", fields: str = "") -> list[Manifest]:
        """Read all objects that match, page by page.

        Args:
            kind: of the objects.
            namespace: where; empty for everywhere.
            selector: label selector.
            fields: field selector.
        """
        return (await self.snapshot(kind, namespace, selector, fields)).items

    async def snapshot(
        self, kind: str, namespace: str, selector: str = "", fields: str = "", *, metadata_only: bool = False
    ) -> Snapshot:
        """Like :meth:`list`, with the resource version of the whole; ``metadata_only`` leaves all else out."""
        found: list[Manifest] = []
        query = {"limit": str(LIST_PAGE)}
        query |= {"labelSelector": selector} if selector else {}
        query |= {"fieldSelector": fields} if fields else {}
        while True:
            accept = METADATA_ONLY if metadata_only else JSON
            page = await self._call("GET", KINDS[kind].path(namespace), query, accept=accept)
            found += page.get("items") or []
            metadata = page.get("metadata", {})
            if not (token := metadata.get("continue")):
                return Snapshot(found, str(metadata.get("resourceVersion", "")))
            query["continue"] = token

    async def create(self, manifest: Manifest) -> Manifest:
        """Make an object. One that is there already is left alone (:attr:`KubeError.exists`)."""
        kind, namespace, _ = _address(manifest)
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        return await self._call("POST", kind.path(namespace), query, manifest)

    async def apply(self, manifest: Manifest, uid: str) -> Manifest:
        """Apply an object on the server, as the owner of the fields in it.

        Args:
            manifest: the whole of what we want.
            uid: of the object that is meant: another one of that name is not touched (409).
        """
        kind, namespace, name = _address(manifest)
        guarded = {**manifest, "metadata": {**manifest["metadata"], "uid": uid}}
        query = {"fieldManager": FIELD_MANAGER, "force": "true", "fieldValidation": "Strict"}
        return await self._call("PATCH", kind.path(namespace, name), query, guarded, content_type=APPLY)

    async def patch(
        self, kind: str, namespace: str, name: str, patch: Mapping[str, Any], subresource: str = ""
    ) -> Manifest:
        """Merge ``patch`` into an object or one of its subresources (``status``, ``scale``)."""
        path = KINDS[kind].path(namespace, name, subresource)
        return await self._call("PATCH", path, {"fieldManager": FIELD_MANAGER}, patch, content_type=MERGE)

    async def delete(self, kind: str, namespace: str, name: str, uid: str = "") -> None:
        """Delete an object and what it owns; one that has gone is no error.

        Args:
            kind: of the object.
            namespace: where it is.
            name: of the object.
            uid: delete this very object only.
        """
        options: dict[str, Any] = {"propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        try:
            await self._call("DELETE", KINDS[kind].path(namespace, name), None, options)
        except KubeError as error:
            if not error.missing:
                raise

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        *,
        content_type: str = JSON,
        accept: str = JSON,
    ) -> Manifest:
        headers = {"Accept": accept, **({"Content-Type": content_type} if body is not None else {})}
        try:
            async with asyncio.timeout(self._deadline_s):
                request = await self._api.param_serialize(
                    method, path, {}, list((query or {}).items()), headers, body, auth_settings=["BearerToken"]
                )
                response = await self._api.call_api(*request)
                text = await response.read()
        except TimeoutError:
            raise KubeError(0, "Unreachable", f"no answer to {method} {path} in {self._deadline_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise KubeError(0, "Unreachable", f"{method} {path}: {error or type(error).__name__}") from error
        answer = _json(text)
        if not 200 <= response.status < 300:
            reason = str(answer.get("reason") or response.reason or response.status)
            raise KubeError(response.status, reason, str(answer.get("message") or ""))
        return answer


def _checked(kube: Kube) -> type[aiohttp.ClientRequest]:
    """Requests that ask ``before_write`` at the last moment: waiting for a free connection may have taken seconds."""

    class Request(aiohttp.ClientRequest):
        async def write_bytes(
            self, writer: AbstractStreamWriter, conn: Connection, content_length: int | None = None
        ) -> None:
            # The headers are still held back here, to leave with the body; all our writes have one.
            if self.method != "GET" and LEASES not in self.url.raw_path:
                try:
                    kube.before_write()
                except Exception as error:
                    assert conn.protocol is not None
                    conn.protocol.set_exception(error)
                    return
            await super().write_bytes(writer, conn, content_length)

    return Request


def _address(manifest: Manifest) -> tuple[Kind, str, str]:
    return KINDS[manifest["kind"]], manifest["metadata"].get("namespace", ""), manifest["metadata"]["name"]


def _json(text: bytes) -> Manifest:
    try:
        answer = json.loads(text) if text else {}
    except ValueError:
        answer = {"message": text[:500].decode(errors="replace")}
    return answer if isinstance(answer, dict) else {}
