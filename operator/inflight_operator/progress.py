"""How far runs are: read from their coordinators' ``GET /v1/state``, now and then, a bounded number at once.

Nothing that a coordinator does raises here, or takes unbounded time or memory.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final

import aiohttp

from inflight_operator.kube import KubeError
from inflight_operator.run_state import Reading, UnreadableError, understand
from inflight_operator.workqueue import WorkQueue
from inflight_runtime.api.status import Progress

__all__ = ["ProgressReader", "Reading", "Token"]

PATH: Final = "/v1/state"
LARGEST_ANSWER_BYTES: Final = 1_000_000
MARGIN_S: Final = 5.0
NO_TOKEN_IN_TIME: Final = "the job's token could not be read in time"  # noqa: S105
NO_ANSWER: Final = "no answer within"
LATE: Final = (NO_ANSWER, NO_TOKEN_IN_TIME)
"""How an error begins that only says that it took too long: perhaps nothing but a busy machine."""

Token = Callable[[str, str, bool], Awaitable[str]]
"""Gives a job's bearer token for ``(namespace, name, fresh)``; ``fresh``: the one known before was refused."""


class _RefusedError(UnreadableError):
    """The token was refused."""


@dataclass(slots=True, eq=False)
class _Run:
    """What is remembered of one run."""

    url: str = ""
    """Where to read from; empty while nobody follows it."""
    reading: Reading | None = None
    number: int = 0
    """Of the attempt that gave :attr:`reading`: one that began earlier and ended later is older news."""
    failures: int = 0


class ProgressReader:
    """Reads the state of the runs that are followed.

    All methods belong to one event loop.

    Args:
        token: gives bearer tokens. What it raises is a reading with an error.
        changed: told the key of a run when a reading that nobody asked for shows something new.
        period_s: seconds between readings of a run that answers.
        deadline_s: seconds that one reading may take, the token included.
        at_once: readings at a time, :meth:`read_now` apart.
        longest_pause_s: the pause doubles with each failure in a row, up to this many seconds.
    """

    def __init__(
        self,
        token: Token,
        changed: Callable[[str], None],
        *,
        period_s: float = 10.0,
        deadline_s: float = 3.0,
        at_once: int = 16,
        longest_pause_s: float = 60.0,
    ) -> None:
        self._token = token
        self._changed = changed
        self._period_s = period_s
        self._deadline_s = deadline_s
        self._longest_pause_s = longest_pause_s
        self._runs: dict[str, _Run] = {}
        self._begun = 0
        self._session: aiohttp.ClientSession | None = None
        self._ended = False
        self._queue = WorkQueue(self._work, workers=at_once, deadline_s=deadline_s + MARGIN_S)

    def follow(self, key: str, url: str) -> None:
        """Go on reading a run; the first time, and when its address has changed, at once.

        Args:
            key: ``namespace/name`` of the job.
            url: address of its coordinator.
        """
        run = self._runs.setdefault(key, _Run())
        if run.url != url:
            run.url = url
            run.failures = 0
            self._queue.add(key)

    def forget(self, key: str) -> None:
        """Read a run no more, and drop what is known of it."""
        self._runs.pop(key, None)
        self._queue.forget(key)

    def latest(self, key: str) -> Reading | None:
        """What is known of a run; ``None`` before the first attempt to read it has ended."""
        run = self._runs.get(key)
        return run.reading if run is not None else None

    async def read_now(self, key: str, url: str) -> Reading:
        """Read a run once, at once; :meth:`latest` knows the result until the run is forgotten.

        ``changed`` is not called: the caller has the result.
        """
        run = self._runs.setdefault(key, _Run())
        number, reading = await self._read(key, run, url)
        _remember(run, number, reading)
        return reading

    async def run(self) -> None:
        """Read until cancelled."""
        try:
            await self._queue.run()
        finally:
            self._ended = True
            if self._session is not None:
                await self._session.close()

    async def _work(self, key: str) -> float | None:
        run = self._runs.get(key)
        if run is None or not run.url:
            return None
        url, before = run.url, run.reading
        number, reading = await self._read(key, run, url)
        if self._runs.get(key) is not run or run.url != url:
            return None  # forgotten meanwhile, or about to be read at its new address
        run.failures = run.failures + 1 if reading.error else 0
        if run.failures > 1 or before is None or before.error or not reading.error.startswith(LATE):
            _remember(run, number, reading)  # one late answer of many is no news
        if run.reading != before:
            self._changed(key)
        return min(self._longest_pause_s, self._period_s * 2.0 ** min(max(run.failures - 1, 0), 30))

    async def _read(self, key: str, run: _Run, url: str) -> tuple[int, Reading]:
        """Try once; what cannot be had now is filled in from what is known."""
        self._begun += 1
        number = self._begun
        try:
            reading = understand(await self._ask(key, url))
        except UnreadableError as error:
            reading = Reading(None, error=str(error))
        known = run.reading
        if reading.progress is None and known is not None:
            reading = replace(known, error=reading.error)
        elif known is not None and reading.progress is not None and _same(reading.progress, known.progress):
            # The older object with the older time: what is shown stays the same to the letter.
            reading = replace(reading, progress=known.progress)
        return number, reading

    async def _ask(self, key: str, url: str) -> bytes:
        """The body of the coordinator's answer.

        Raises:
            UnreadableError: there is none.
        """
        if self._ended:
            raise UnreadableError("the operator is stopping")
        namespace, _, name = key.partition("/")
        late = NO_TOKEN_IN_TIME
        try:
            async with asyncio.timeout(self._deadline_s):
                token = await self._token_of(namespace, name, fresh=False)
                late = f"{NO_ANSWER} {self._deadline_s:g} s"
                try:
                    return await self._get(url, token)
                except _RefusedError:
                    newer = await self._token_of(namespace, name, fresh=True)
                    if newer == token:
                        raise
                    return await self._get(url, newer)
        except TimeoutError:
            raise UnreadableError(late) from None

    async def _token_of(self, namespace: str, name: str, *, fresh: bool) -> str:
        try:
            token = await self._token(namespace, name, fresh)
        except TimeoutError:
            raise
        except Exception as error:
            raise UnreadableError(f"the job's token could not be read: {_cause(error)}") from error
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            raise UnreadableError("the job's token is empty or has characters that a header cannot carry")
        return token

    async def _get(self, url: str, token: str) -> bytes:
        # Uncompressed: a small body may unpack into a large one.
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json", "Accept-Encoding": "identity"}
        try:
            async with self._connections().get(
                url.rstrip("/") + PATH, headers=headers, allow_redirects=False
            ) as response:
                if response.status == 401:
                    raise _RefusedError("the coordinator refuses the job's token")
                if response.status != 200:
                    raise UnreadableError(f"the coordinator answers with HTTP status {response.status}")
                body = bytearray()
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > LARGEST_ANSWER_BYTES:
                        raise UnreadableError(f"the answer has more than {LARGEST_ANSWER_BYTES} bytes")
                return bytes(body)
        except TimeoutError:  # an OSError too, and of the caller's deadline
            raise
        except UnreadableError:
            raise
        except Exception as error:
            raise UnreadableError(_network_cause(error)) from error

    def _connections(self) -> aiohttp.ClientSession:
        if self._session is None:
            # No limit of its own, as waiting for a connection would use up the deadline; the callers are bounded. A
            # connection is not kept: by the next reading, the pod behind it may be another one.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=self._deadline_s + MARGIN_S),
                auto_decompress=False,
                trust_env=False,
            )
        return self._session


def _remember(run: _Run, number: int, reading: Reading) -> None:
    if number > run.number:
        run.number, run.reading = number, reading


def _network_cause(error: Exception) -> str:
    """Why there is no answer, without what differs from one attempt to the next."""
    if isinstance(error, aiohttp.InvalidURL | aiohttp.NonHttpUrlClientError):
        return "the coordinator's address is not a URL"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"the name {error.host} cannot be resolved"
    if isinstance(error, aiohttp.ClientConnectorError):
        why = os.strerror(error.errno) if error.errno else type(error).__name__
        return f"cannot connect to {error.host}:{error.port}: {why}"
    if isinstance(error, aiohttp.ClientResponseError):
        return "what answers does not speak HTTP"
    if isinstance(error, aiohttp.ClientError | OSError):
        return "the connection was closed before the answer was complete"
    return f"the coordinator cannot be asked: {type(error).__name__}"


def _same(new: Progress, old: Progress | None) -> bool:
    return old is not None and new.model_copy(update={"updated_time": old.updated_time}) == old


def _cause(error: Exception) -> str:
    """An exception of the token function in words; those of the API server only where they stay the same."""
    if isinstance(error, KubeError):
        return "the API server does not answer" if error.status == 0 else error.reason if error.passing else str(error)
    return f"{type(error).__name__}: {error}"[:200]
