"""The API server, by the user's own kubeconfig: plain dicts, a deadline on every wait, refusals in words."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote

import aiohttp
import yaml
from kubernetes.aio import client as kubernetes_client
from kubernetes.aio import config as kubernetes_config

from inflight_runtime.api import API_VERSION
from inflight_runtime.target import Cluster

Object = dict[str, Any]
"""An object as the API has it."""
CALL_DEADLINE_S: Final = 20.0
PAGE: Final = "500"
"""Objects in one answer."""
LONGEST_LINE: Final = 16 * 1024
"""Of a log; a longer one comes in parts."""
LONGEST_EVENT: Final = 8 * 1024 * 1024
USUAL_PLACE: Final = "~/.kube/config"


class ClusterError(Exception):
    """Something in the way, in words for the user."""


class UnreachableError(ClusterError):
    """The API server does not answer, or not in time; worth trying again."""


class RefusedError(ClusterError):
    """The API server said no.

    Attributes:
        status: HTTP status.
        words: the API server's own.
    """

    def __init__(self, status: int, words: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.words = words


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object, and where the API keeps it.

    Attributes:
        api_version: group and version.
        plural: its name in paths.
    """

    api_version: str
    plural: str

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        """Path of a namespace's objects, of one, or of a part of one; an empty namespace means all of them."""
        root = f"/api/{self.api_version}" if "/" not in self.api_version else f"/apis/{self.api_version}"
        within = f"/namespaces/{quote(namespace, safe='')}" if namespace else ""
        return "/".join(
            [f"{root}{within}", self.plural, *(quote(part, safe="") for part in (name, subresource) if part)]
        )

    @property
    def full_name(self) -> str:
        """As RBAC and kubectl name it."""
        group, slash, _ = self.api_version.partition("/")
        return f"{self.plural}.{group}" if slash else self.plural


JOBS: Final = Resource(API_VERSION, "rltrainingjobs")
PODS: Final = Resource("v1", "pods")


class Connection:
    """A connection to one cluster's API server.

    Every method raises :class:`ClusterError` when it cannot do what it says.

    Attributes:
        context: the context's name.
        namespace: the one that is looked into; empty for all.
    """

    def __init__(self, cluster: Cluster, context: str, namespace: str, configuration: Any) -> None:
        self.context = context
        self.namespace = "" if cluster.all_namespaces else namespace
        self._cluster = cluster
        self._configuration = configuration
        self._api: Any = kubernetes_client.ApiClient(configuration)  # its methods have no types

    @classmethod
    async def open(cls, cluster: Cluster) -> Self:
        """Read the kubeconfig; nothing is asked of the API server yet."""
        configuration = kubernetes_client.Configuration()
        context, namespace = await _load(cluster, configuration)
        try:
            return cls(cluster, context, cluster.namespace or namespace, configuration)
        except (OSError, ValueError) as error:  # a certificate that is none; ssl.SSLError is an OSError
            raise ClusterError(f"context {context}: its certificates cannot be used: {error}") from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._api.close()

    @property
    def place(self) -> str:
        """Where this looks, in words."""
        return f"namespace {self.namespace}" if self.namespace else "all namespaces"

    async def get(self, resource: Resource, name: str) -> Object:
        """Read one object."""
        return await self._read(resource.path(self.namespace, name), {}, f"get {resource.full_name}")

    async def list(self, resource: Resource, query: Mapping[str, str]) -> tuple[list[Object], str]:
        """Read all objects that match, and the version of the whole."""
        found: list[Object] = []
        asked = {**query, "limit": PAGE}
        while True:
            page = await self._read(resource.path(self.namespace), asked, f"list {resource.full_name}")
            found += page.get("items") or []
            metadata = page.get("metadata") or {}
            if not (token := metadata.get("continue")):
                return found, str(metadata.get("resourceVersion", ""))
            asked["continue"] = token

    async def watch(self, resource: Resource, query: Mapping[str, str], seconds: int) -> AsyncGenerator[Object, None]:
        """Get the events of one watch request, which the server ends after ``seconds``."""
        asked = {**query, "watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(seconds)}
        path = resource.path(self.namespace)
        lines = self._lines(path, asked, f"watch {resource.full_name}", seconds + CALL_DEADLINE_S, LONGEST_EVENT)
        async with aclosing(lines) as events:
            async for line in events:
                if line:
                    event = _json(line)
                    if event:
                        yield event

    def log(self, pod: str, query: Mapping[str, str], silence_s: float) -> AsyncGenerator[bytes, None]:
        """Get a container's log line by line; no line in ``silence_s`` raises :class:`UnreachableError`."""
        path = PODS.path(self.namespace, pod, "log")
        return self._lines(path, query, "get pods/log", silence_s, LONGEST_LINE)

    async def _read(self, path: str, query: Mapping[str, str], right: str) -> Object:
        try:
            async with asyncio.timeout(CALL_DEADLINE_S):
                response = await self._ask(path, query, right)
                try:
                    return _json(await response.read())
                finally:
                    response.close()
        except TimeoutError:
            raise self._unreachable(f"no answer in {CALL_DEADLINE_S:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable(error) from error

    async def _lines(
        self, path: str, query: Mapping[str, str], right: str, silence_s: float, longest: int
    ) -> AsyncGenerator[bytes, None]:
        try:
            async with asyncio.timeout(CALL_DEADLINE_S):
                response = await self._ask(path, query, right)
            rest = b""
            try:
                while True:
                    async with asyncio.timeout(silence_s):  # never around a yield: whoever takes the line has time
                        chunk = await response.content.readany()
                    *whole, rest = (rest + chunk).split(b"\n") if chunk else [*([rest] if rest else []), b""]
                    for line in whole:
                        yield line
                    if not chunk:
                        return
                    while len(rest) > longest:
                        yield rest[:longest]
                        rest = rest[longest:]
            finally:
                response.close()
        except TimeoutError:
            raise self._unreachable("nothing came any more") from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable(error) from error

    async def _ask(self, path: str, query: Mapping[str, str], right: str) -> aiohttp.ClientResponse:
        response = await self._send(path, query)
        if response.status == 401:
            # A credential plugin's token may have run out since.
            response.close()
            await _load(self._cluster, self._configuration)
            response = await self._send(path, query)
        if response.status == 200:
            return response
        try:
            text = await response.read()
        finally:
            response.close()
        if response.status == 403 and not await self._served(path):
            raise RefusedError(404, "", self._not_installed(right))
        raise self._refusal(response.status, text, right)

    async def _served(self, path: str) -> bool:
        """Whether the API server knows a path's group: who may do nothing is refused before that is found out."""
        if not path.startswith("/apis/"):
            return True
        response = await self._send("/".join(path.split("/")[:4]), {})
        response.close()
        return response.status != 404

    async def _send(self, path: str, query: Mapping[str, str]) -> aiohttp.ClientResponse:
        headers = {"Accept": "application/json, */*"}
        request = await self._api.param_serialize(
            "GET", path, {}, list(query.items()), headers, None, auth_settings=["BearerToken"]
        )
        # The deadlines are ours; the client's own would also end what goes on.
        answer = await self._api.call_api(*request, _request_timeout=aiohttp.ClientTimeout())
        response: aiohttp.ClientResponse = answer.response
        return response

    def _unreachable(self, cause: object) -> UnreachableError:
        text = str(cause) or type(cause).__name__
        return UnreachableError(f"the API server of context {self.context} ({self._host}) does not answer: {text}")

    @property
    def _host(self) -> str:
        return str(self._configuration.host)

    def _not_installed(self, right: str) -> str:
        return (
            f"the cluster of context {self.context} does not know {right.rpartition(' ')[2]}: Inflight is not "
            "installed there; kubectl apply -f crds/, or install the chart"
        )

    def _refusal(self, status: int, text: bytes, right: str) -> RefusedError:
        answer = _json(text)
        words = str(answer.get("message") or text[:500].decode(errors="replace").strip())
        if status == 401:
            message = f"the API server does not accept the credentials of context {self.context}; log in again"
        elif status == 403:
            who = "the cluster's own roles view, edit and admin have it"
            message = f"you may not {right} in {self.place}: {words}; ask for that right ({who})"
        elif status == 404 and not answer:
            message = self._not_installed(right)
        else:
            message = f"{right} in {self.place}: {words or f'HTTP status {status}'}"
        return RefusedError(status, words, message)


async def _load(cluster: Cluster, configuration: Any) -> tuple[str, str]:
    """Put address and credentials into ``configuration``; the names of context and namespace."""
    place = cluster.kubeconfig or os.environ.get("KUBECONFIG") or USUAL_PLACE
    files = _files(place)
    loaders: Any = kubernetes_config  # its functions have no types
    if not files:
        if not cluster.kubeconfig and not cluster.context and "KUBERNETES_SERVICE_HOST" in os.environ:
            loaders.load_incluster_config(client_configuration=configuration)
            return "of this pod", _own_namespace()
        what = "--kubeconfig" if cluster.kubeconfig else "KUBECONFIG" if os.environ.get("KUBECONFIG") else "kubeconfig"
        raise ClusterError(
            f"{what}: there is no file {place}; give one that kubectl uses, by --kubeconfig or KUBECONFIG"
        )
    known = _contexts(files)
    if cluster.context and cluster.context not in known:
        names = f"there are {', '.join(known)}" if known else "the kubeconfig has none"
        raise ClusterError(f"--context: there is no context {cluster.context} in {place}; {names}")
    try:
        loader = await loaders.load_kube_config(
            os.pathsep.join(str(file) for file in files),
            context=cluster.context or None,
            client_configuration=configuration,
            persist_config=False,
        )
    except (kubernetes_config.ConfigException, OSError, ValueError, TypeError, KeyError, ssl.SSLError) as error:
        hint = f"; choose one by --context: {', '.join(known)}" if known else ""
        raise ClusterError(f"{place} cannot be used: {error}{hint}") from error
    current = loader.current_context
    return str(current["name"]), str(current["context"].get("namespace") or "default")


def _files(place: str) -> list[Path]:
    """Those of a list of paths that are there."""
    paths = (Path(part).expanduser() for part in place.split(os.pathsep) if part)
    return [path for path in paths if path.is_file()]


def _contexts(files: list[Path]) -> list[str]:
    names: dict[str, None] = {}
    for file in files:
        try:
            document = yaml.safe_load(file.read_text())
            names |= dict.fromkeys(str(one["name"]) for one in document.get("contexts") or [])
        except (OSError, ValueError, yaml.YAMLError, AttributeError, TypeError, KeyError) as error:
            raise ClusterError(f"{file} is no kubeconfig that can be read: {error}") from error
    return [*names]


def _own_namespace() -> str:
    try:
        return Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace").read_text().strip()
    except OSError:
        return "default"


def _json(text: bytes) -> Object:
    try:
        answer = json.loads(text) if text else {}
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}
