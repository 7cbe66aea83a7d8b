"""``python -m inflight_runtime.inference.vllm_server FLAGS``: vLLM's API server, up in half the time.

Most of a start is importing vLLM. So modules load without garbage collections; and on a CPU the engine's process is a
fork of the API server's, which has all of them already. vLLM would begin it anew, as it must on a device that does not
survive a fork.
"""

from __future__ import annotations

import contextlib
import multiprocessing.context
import os
import signal
import socket
from pathlib import Path

from inflight_runtime.config.roles import InferenceConfig, load_role_config
from inflight_runtime.garbage import loading_modules
from inflight_runtime.inference.vllm_launch import CONFIG_ENV


class ForkedEngine(multiprocessing.context.ForkProcess):
    """The engine's process; lets go of what is the API server's alone."""

    def run(self) -> None:
        """The engine, until it ends."""
        signal.set_wakeup_fd(-1)  # else the API server's event loop hears of the engine's signals
        close_listeners()  # else the port stays taken for as long as the engine outlives its server
        super().run()


class EngineContext(multiprocessing.context.ForkContext):
    """What vLLM makes the engine's process with."""

    Process = ForkedEngine


def close_listeners() -> None:
    """Close every socket of this process at which others connect over a network."""
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it is no socket
            found = socket.socket(fileno=int(file.name))
            if found.family == socket.AF_UNIX or not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.detach()
            found.close()


def main() -> None:
    """Serve until told to end."""
    config = load_role_config(InferenceConfig, Path(os.environ[CONFIG_ENV]))
    with loading_modules():
        from vllm.entrypoints.launchers.api_server import entry  # noqa: PLC0415  this module is imported by tests, too
        from vllm.v1.engine import async_llm, utils  # noqa: F401, PLC0415

    if config.device == "cpu":
        utils.get_mp_context = EngineContext
    entry.main()


if __name__ == "__main__":
    main()
