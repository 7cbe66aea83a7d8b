"""The operator's process: what it is made of, and how it begins and ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import uuid
from collections import Counter
from typing import Final, NoReturn

from inflight_operator.apply import Applier
from inflight_operator.events import EventWriter
from inflight_operator.handlers import Watch, watched_kinds
from inflight_operator.kube import Kube, KubeError
from inflight_operator.leader import Leadership, LeaseLost
from inflight_operator.logs import job_context
from inflight_operator.metrics import OperatorMetrics
from inflight_operator.progress import ProgressReader
from inflight_operator.reconciler import Reconciler
from inflight_operator.server import serving
from inflight_operator.settings import Settings
from inflight_operator.store import Store
from inflight_operator.sync import Sync
from inflight_operator.tokens import Tokens
from inflight_operator.workqueue import Attempt, WorkQueue
from inflight_runtime.api import KIND

logger = logging.getLogger(__name__)

LEASE: Final = "inflight-operator"
STUCK_S: Final = 180.0
"""Work that has stood still this long never goes on: one call is cut off after a minute."""
TRY_AGAIN_S: Final = 5.0
COUNT_EVERY_S: Final = 5.0


class Operator:
    """One operator process.

    Args:
        settings: from the environment.
        kubeconfig: file with credentials; empty inside of a cluster.
    """

    def __init__(self, settings: Settings, kubeconfig: str = "") -> None:
        self._settings = settings
        self._kubeconfig = kubeconfig
        self._metrics = OperatorMetrics()
        self._queue: WorkQueue | None = None
        self._ready = False

    async def run(self) -> None:
        """Work until SIGTERM or SIGINT.

        Raises:
            ServerError: probes and metrics cannot be served.
            kubernetes.aio.config.ConfigException: there are no credentials.
        """
        loop = asyncio.get_running_loop()
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
        settings = self._settings
        async with (
            await Kube.connect(self._kubeconfig) as kube,
            serving(
                settings.http_host,
                settings.http_port,
                healthy=self._healthy,
                ready=lambda: "" if self._ready else "starting",
                registry=self._metrics.registry,
            ) as port,
        ):
            logger.info("probes and metrics on port %d", port)
            work = asyncio.create_task(self._lead(kube))
            stop = asyncio.create_task(stopped.wait())
            await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            if not work.done():
                logger.info("ending")
                work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work

    async def _lead(self, kube: Kube) -> None:
        """Act while the Lease is ours; without one, at once."""
        self._ready = True
        namespace = self._settings.lease_namespace
        if not namespace:
            await self._act(kube)
            return
        identity = f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        leadership = Leadership(kube, namespace, LEASE, identity)
        await leadership.acquire()
        self._metrics.leader(True)

        def check() -> None:
            try:
                leadership.check()
            except LeaseLost as error:
                _end_at_once(error)

        kube.before_write = check
        hold = asyncio.create_task(self._hold(leadership))
        try:
            await self._act(kube)
        finally:
            hold.cancel()
            await leadership.release()

    async def _hold(self, leadership: Leadership) -> None:
        try:
            await leadership.hold()
        except LeaseLost as error:
            _end_at_once(error)

    async def _act(self, kube: Kube) -> None:
        settings = self._settings
        store, metrics = Store(), self._metrics
        tokens = Tokens(kube, metrics.child_write)
        applier = Applier(kube, store, tokens, metrics.child_write)
        progress = ProgressReader(tokens.token, lambda key: queue.add(key))  # noqa: PLW0108  the queue comes later
        reconciler = Reconciler(
            kube, store, settings, applier=applier, tokens=tokens, progress=progress, events=EventWriter(kube)
        )

        async def work(key: str) -> float | None:
            with job_context(key):
                return await reconciler.reconcile(key)

        queue = self._queue = WorkQueue(work, workers=settings.workers, on_attempt=self._attempted)
        metrics.watch(queue)
        sync = Sync(kube, store, settings.namespace, queue.add)
        await _until_readable(sync)
        async with asyncio.TaskGroup() as group:
            group.create_task(queue.run())
            group.create_task(progress.run())
            group.create_task(_watch(settings, sync))
            group.create_task(self._count(store))

    def _attempted(self, attempt: Attempt) -> None:
        self._metrics.attempt(attempt)
        if attempt.error is not None:
            with job_context(attempt.key):
                expected = isinstance(attempt.error, KubeError | TimeoutError)
                logger.warning(
                    "reconciling failed (%d in a row), again in %.1f s: %s",
                    attempt.failures,
                    attempt.again_in_s or 0.0,
                    attempt.error or type(attempt.error).__name__,
                    exc_info=None if expected else attempt.error,
                )

    def _healthy(self) -> str:
        stuck = 0.0 if self._queue is None else self._queue.stuck_s()
        return "" if stuck < STUCK_S else f"work has stood still for {stuck:.0f} s"

    async def _count(self, store: Store) -> None:
        while True:
            jobs = [job for key in store if (job := store.job(key)) is not None]
            self._metrics.phases(Counter((job.get("status") or {}).get("phase") or "Pending" for job in jobs))
            await asyncio.sleep(COUNT_EVERY_S)


def _end_at_once(error: LeaseLost) -> NoReturn:
    """Nothing may be written any more: no clean-up is worth a second operator at work."""
    logger.error("the lease is lost: %s", error)
    logging.shutdown()
    os._exit(1)


async def _until_readable(sync: Sync) -> None:
    """Read the cluster, waiting for the API server and for our own resource to be installed."""
    while True:
        try:
            await sync.start()
        except KubeError as error:
            logger.warning("the cluster cannot be read yet: %s", error)
        else:
            if KIND not in sync.missing:
                return
            logger.warning("%s is not installed: apply crds/", KIND)
        await asyncio.sleep(TRY_AGAIN_S)


async def _watch(settings: Settings, sync: Sync) -> None:
    """Watch, anew whenever a kind has come or gone: Kopf looks only once what there is, and ends when one goes."""
    while True:
        changed = asyncio.Event()
        kinds = watched_kinds(sync.missing)
        watch = Watch(settings, kinds, sync.seen)
        watch.start()
        logger.info("watching %s", ", ".join(kinds))
        checks = asyncio.create_task(sync.run(changed.set))
        ended = asyncio.create_task(watch.ended())
        tasks = [checks, ended, asyncio.create_task(changed.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await watch.stop()
            await asyncio.wait(tasks)
        if not checks.cancelled():
            await checks  # it ends only by a mistake of ours
        if not ended.cancelled() and (error := ended.exception()) is not None:
            logger.warning("%s; watching anew", error)
            await asyncio.sleep(TRY_AGAIN_S)
            await sync.look()
