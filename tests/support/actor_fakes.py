"""What an actor talks to, small enough to be steered by a test: a codec, an inference server, a coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from inflight_runtime.config.roles import ActorConfig, EnvironmentSpec, ModelFiles, Sampling
from inflight_runtime.coordinator.client import FencedError
from inflight_runtime.protocol import (
    Completion,
    DatasetInfo,
    DropRequest,
    FailRequest,
    GenerateReply,
    GenerateRequest,
    Lease,
    LeaseReply,
    LeaseRequest,
    Member,
    MembersReply,
    RenewReply,
    RenewRequest,
    SubmitReply,
    VersionField,
    WireSpan,
)
from inflight_runtime.types import Group, decode_group, encode_group

EOS = 0
EOS_TEXT = "§"
VERSION = VersionField(epoch=1, step=3)


class CharCodec:
    """One token per character; token 0 ends an answer and reads as a section sign when special tokens are shown."""

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        body = "".join(f"<{message['role']}>{message['content']}{EOS_TEXT}" for message in messages)
        return f"{body}{options.get('suffix', '')}<assistant>"

    def encode(self, text: str) -> list[int]:
        return [EOS if character == EOS_TEXT else ord(character) for character in text]

    def decode(self, ids: Sequence[int], *, special: bool) -> str:
        return "".join((EOS_TEXT if special else "") if token == EOS else chr(token) for token in ids)


def answer_ids(seed: int, max_tokens: int) -> list[int]:
    """What the stub samples: a few letters that depend on the seed, then the end."""
    digest = hashlib.sha256(str(seed).encode()).digest()
    letters = [ord("a") + byte % 8 for byte in digest[: digest[31] % 4 + 1]]
    return [*letters, EOS][:max_tokens]


def make_completion(ids: Sequence[int], version: VersionField = VERSION, finish: str | None = None) -> Completion:
    ids = list(ids)
    spans = [WireSpan(epoch=version.epoch, step=version.step, start=0, end=len(ids))] if ids else []
    ending = finish or ("stop" if ids and ids[-1] == EOS else "length")
    return Completion(ids=ids, logprobs=[-0.5] * len(ids), spans=spans, finish=ending)  # type: ignore[arg-type]


@dataclass
class StubServer:
    """An inference server that answers ``/runtime/v1/generate`` from a function; ``behave`` may be replaced."""

    server_id: str = "s0"
    boot_id: str = "b0"
    token: str = "a-token-for-tests"
    version: VersionField = field(default_factory=lambda: VERSION)
    url: str = ""
    requests: list[GenerateRequest] = field(default_factory=list)
    behave: Callable[[GenerateRequest], Awaitable[web.Response | None]] | None = None
    runner: web.AppRunner | None = None

    def answer(self, request: GenerateRequest) -> web.Response:
        seeds = request.seeds or list(range(request.n))
        completions = [make_completion(answer_ids(seed, request.max_tokens), self.version) for seed in seeds]
        return self.reply(completions)

    def reply(self, completions: list[Completion]) -> web.Response:
        body = GenerateReply(server_id=self.server_id, boot_id=self.boot_id, completions=completions)
        return web.Response(text=body.model_dump_json(), content_type="application/json")

    async def _generate(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"error": "no such token"}, status=401)
        body = GenerateRequest.model_validate_json(await request.read())
        self.requests.append(body)
        if self.behave is not None and (answer := await self.behave(body)) is not None:
            return answer
        return self.answer(body)

    async def start(self, port: int = 0) -> None:
        app = web.Application()
        app.router.add_post("/runtime/v1/generate", self._generate)
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    def member(self, **changes: Any) -> Member:
        settings: dict[str, Any] = {
            "server_id": self.server_id,
            "boot_id": self.boot_id,
            "url": self.url,
            "engine": "reference",
            "world_size": 1,
            "capacity": 8,
            "max_length": 512,
            "state": "READY",
            "version": self.version,
        }
        return Member(**(settings | changes))


@contextlib.asynccontextmanager
async def running(*servers: StubServer) -> AsyncIterator[None]:
    try:
        for server in servers:
            await server.start()
        yield
    finally:
        for server in servers:
            await server.stop()


def snapshot(*members: Member, revision: int = 1, finished: bool = False) -> MembersReply:
    return MembersReply(revision=revision, epoch=1, policy_version=VERSION, finished=finished, members=list(members))


class FakeCoordinator:
    """The coordinator's side of the actor's protocol, in memory: gives ``groups`` leases and keeps what comes back."""

    def __init__(self, groups: int, members: Sequence[Member], *, attempts: int = 4, ttl_s: float = 30.0) -> None:
        self.left = list(range(groups))
        self.attempts = attempts
        self.ttl_s = ttl_s
        self.kind = "train"
        self.total = groups
        self.membership = snapshot(*members)
        self.dataset: DatasetInfo | None = None
        self.leased: dict[int, int] = {}
        self.groups: dict[int, Group] = {}
        self.dropped: dict[int, DropRequest] = {}
        self.released: list[int] = []
        self.failure: FailRequest | None = None
        self.renewals = 0
        self.lease_requests = 0
        self.lost: set[int] = set()
        self.fenced: set[int] = set()
        self._changed = asyncio.Event()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def finished(self) -> bool:
        settled = len(self.groups) + len(self.dropped) + len(self.lost) + len(self.fenced)
        return self.failure is not None or settled >= self.total

    async def until(self, condition: Callable[[], bool], deadline_s: float = 20.0) -> None:
        """Wait for something to become true; fails the test when it does not."""
        async with asyncio.timeout(deadline_s):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    def set_members(self, *members: Member) -> None:
        self.membership = snapshot(*members, revision=self.membership.revision + 1)
        self._wake()

    async def announce_dataset(self, info: DatasetInfo) -> None:
        self.dataset = info

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        self.lease_requests += 1
        assert request.max_groups >= 1
        if not self.left and not self.finished:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(request.wait_seconds):
                    while not self.left and not self.finished:
                        await self._changed.wait()
        given, self.left = self.left[: request.max_groups], self.left[request.max_groups :]
        leases = [
            Lease(
                group_id=index,
                fence=1,
                kind=self.kind,  # type: ignore[arg-type]
                problem_index=index,
                attempts=self.attempts,
                min_version=VersionField(epoch=0, step=0),
                ttl_seconds=self.ttl_s,
            )
            for index in given
        ]
        self.leased |= {lease.group_id: lease.fence for lease in leases}
        return LeaseReply(leases=leases, finished=self.finished)

    async def renew(self, request: RenewRequest) -> RenewReply:
        self.renewals += 1
        return RenewReply(lost=[ref for ref in request.leases if ref.group_id in self.lost])

    async def release(self, request: RenewRequest) -> None:
        self.released += [ref.group_id for ref in request.leases]

    async def submit(self, group: Group) -> SubmitReply:
        group.validate()
        if group.group_id in self.fenced:
            self._wake()
            raise FencedError(409, "an older fence")
        self.groups[group.group_id] = decode_group(encode_group(group))
        self._wake()
        return SubmitReply(state="completed" if len(group.survivors) > 1 else "dropped")

    async def drop(self, group_id: int, request: DropRequest) -> None:
        self.dropped[group_id] = request
        self._wake()

    async def fail(self, request: FailRequest) -> None:
        self.failure = request
        self._wake()

    async def members(self, revision: int = -1, wait_seconds: float = 0.0) -> MembersReply:
        if self.membership.revision <= revision:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_seconds):
                    await self._changed.wait()
        return self.membership


def make_actor_config(**changes: Any) -> ActorConfig:
    """An actor's config; ``environment``, ``sampling`` and ``model`` take dicts of changes."""
    environment = EnvironmentSpec(**({"entrypoint": "none:None"} | changes.pop("environment", {})))
    sampling = Sampling(**({"max_tokens": 6, "seed": 7} | changes.pop("sampling", {})))
    model = ModelFiles(**({"path": "none", "tokenizer": "none", "max_length": 256} | changes.pop("model", {})))
    settings: dict[str, Any] = {
        "job": "test",
        "actor_id": "actor-0",
        "coordinator_url": "http://127.0.0.1:9",
        "token_file": "none",
        "model": model,
        "served_name": "policy",
        "environment": environment,
        "sampling": sampling,
        "group_size": 4,
        "concurrency": 4,
        "request_timeout_s": 10.0,
        "request_retries": 3,
    }
    return ActorConfig(**(settings | changes))
