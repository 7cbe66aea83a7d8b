"""``inflight status --watch`` of a local run."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Final

from rich.console import Console

from inflight_runtime.coordinator.client import CoordinatorClient, CoordinatorError, CoordinatorUnavailableError
from inflight_runtime.local.rundir import RunDirectory
from inflight_runtime.local.snapshot import Tracker
from inflight_runtime.local.status import TIMEOUT_S, render_status
from inflight_runtime.local.view import View, make_view

ASK_EVERY_S: Final = 1.0
EXIT_NOT_SUCCEEDED: Final = 1


def watch_status(directory: RunDirectory, console: Console) -> int:
    """Show a run until nobody runs it any more; 0 when it has succeeded.

    Raises:
        RunDirectoryError: it is no run directory.
    """
    record = directory.read_record()
    if directory.is_alive():
        with make_view(console) as view:
            asyncio.run(_watch(directory, record.job, view))
    console.print(render_status(directory), soft_wrap=True)  # paths stay whole
    return 0 if directory.read_record().outcome == "succeeded" else EXIT_NOT_SUCCEEDED


async def _watch(directory: RunDirectory, job: str, view: View) -> None:
    tracker = Tracker(job)
    while directory.is_alive():
        # Read anew: a run that begins writes its coordinator's address when it knows it.
        url = directory.read_record().coordinator_url
        if url:
            # When there is no answer the view says for how long.
            with contextlib.suppress(CoordinatorError, CoordinatorUnavailableError):
                async with CoordinatorClient(url, directory.token(), timeout_s=TIMEOUT_S, retry_for_s=0) as client:
                    tracker.answered(await client.state())
        moment = tracker.snapshot()
        state = moment.state
        if state is not None:
            moment = replace(moment, phase=state.outcome, elapsed_s=state.seconds)
        view.show(moment)
        await asyncio.sleep(ASK_EVERY_S)
