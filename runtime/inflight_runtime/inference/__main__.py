"""``python -m inflight_runtime.inference --config FILE``: one inference server, whatever its engine."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from inflight_runtime.config.roles import InferenceConfig, load_role_config
from inflight_runtime.garbage import loading_modules
from inflight_runtime.inference.checkpoint_names import UnknownCheckpointError, read_expected_tensors
from inflight_runtime.inference.vllm_launch import EngineArgsError, exec_server

EXIT_BAD_INPUT = 2
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def main(arguments: list[str] | None = None) -> int:
    """Start the server that the config describes; returns when it has ended (vLLM replaces this process)."""
    parser = argparse.ArgumentParser(prog="python -m inflight_runtime.inference", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the role config, a JSON file")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    try:
        config = load_role_config(InferenceConfig, options.config)
    except (OSError, ValueError) as error:
        return _refuse(f"{options.config}: {error}")
    try:
        if config.engine == "vllm":
            read_expected_tensors(Path(config.model.path))
            exec_server(config, options.config)
        with loading_modules():
            from inflight_runtime.inference.reference.server import run_server  # noqa: PLC0415  torch only where needed

        return run_server(config)
    except (EngineArgsError, UnknownCheckpointError, FileNotFoundError) as error:
        return _refuse(str(error))


def _refuse(message: str) -> int:
    sys.stderr.write(f"inference server not started: {message}\n")
    return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
