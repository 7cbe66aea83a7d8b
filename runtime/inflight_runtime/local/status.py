"""``inflight status``: how a run stands, from its coordinator if that answers, else from its files."""

from __future__ import annotations

import asyncio

from rich.console import Group, RenderableType
from rich.text import Text

from inflight_runtime.coordinator.client import CoordinatorClient, CoordinatorError, CoordinatorUnavailableError
from inflight_runtime.local.rundir import RunDirectory, read_json_lines
from inflight_runtime.local.snapshot import Snapshot, parts_of
from inflight_runtime.local.summary import newest_checkpoint, surviving
from inflight_runtime.local.text import command_name, plain_text, shown
from inflight_runtime.local.view import picture
from inflight_runtime.protocol import RunState

TIMEOUT_S = 2.0


def render_status(directory: RunDirectory) -> RenderableType:
    """Lay a run's status out.

    Raises:
        RunDirectoryError: it is no run directory.
    """
    record = directory.read_record()
    state = None
    if directory.is_alive() and record.coordinator_url:
        state = asyncio.run(_ask(record.coordinator_url, directory.token()))
    if state is not None:
        live = Snapshot(job=state.job, phase=state.outcome, elapsed_s=state.seconds, state=state)
        return Group(picture(live), Text(f"  {shown(directory.path)}, pid {record.pid}", style="dim"))
    alive = directory.is_alive()
    words = "going on, but its coordinator does not answer" if alive else record.outcome or "not running"
    blocks: list[RenderableType] = [Text.assemble((record.job, "bold"), f"  {words}  ", (shown(directory.path), "dim"))]
    if not alive and record.reason:
        blocks.append(Text(f"  {plain_text(record.reason)}", style="red"))
    metrics = surviving(read_json_lines(directory.metrics))
    if metrics:
        last = metrics[-1]
        numbers = {name: value for name, value in last.items() if isinstance(value, int | float)}
        line = f"  last step {last['step']}"
        if "reward_mean" in numbers:
            line += f"  reward {numbers['reward_mean']:.3f}"
        line += "".join(f"  {name} {value:.3f}" for name, value in parts_of(numbers).items())
        blocks.append(Text(line))
    else:
        blocks.append(Text("  no step is done yet"))
    checkpoint = newest_checkpoint(directory)
    blocks.append(Text(f"  checkpoint {shown(checkpoint) if checkpoint else 'none'}"))
    if not alive and not record.outcome:
        blocks.append(Text(f"  go on: {command_name()} run --resume {shown(directory.path)}"))
    return Group(*blocks)


async def _ask(url: str, token: str) -> RunState | None:
    try:
        async with CoordinatorClient(url, token, timeout_s=TIMEOUT_S, retry_for_s=0) as client:
            return await client.state()
    except (CoordinatorError, CoordinatorUnavailableError):
        return None
