"""``python -m inflight_operator``: runs the operator with settings from the environment (:mod:`.settings`)."""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import logging
import os
import sys

from inflight_operator.logs import configure
from inflight_operator.settings import PREFIX, Settings, SettingsError, settings_from


def main() -> int:
    """Run until ended; 2 when it cannot start."""
    _parser().parse_args()
    try:
        settings = settings_from(os.environ)
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    configure(settings.log_level, json=settings.log_format == "json")
    # Imported late: a wrong setting is told in no time.
    from kubernetes.aio.config import ConfigException  # noqa: PLC0415

    from inflight_operator.process import Operator  # noqa: PLC0415
    from inflight_operator.server import ServerError  # noqa: PLC0415

    try:
        asyncio.run(Operator(settings, os.environ.get("KUBECONFIG", "")).run())
    except ConfigException as error:
        logging.getLogger(__name__).error("no credentials for a cluster: %s; set KUBECONFIG", error)
        return 2
    except ServerError as error:
        logging.getLogger(__name__).error("%s", error)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    lines = []
    for name, field in Settings.model_fields.items():
        default = field.get_default(call_default_factory=True)
        shown = "" if default in ("", {}, (), [], None) else f" (default {default})"
        lines.append(f"  {PREFIX}{name.upper()}{shown}\n      {' '.join((field.description or '').split())}")
    parser = argparse.ArgumentParser(
        prog="python -m inflight_operator",
        description="Reconciles RLTrainingJobs. It connects as KUBECONFIG says, or as the service account of its pod.",
        epilog="Settings come from the environment:\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = importlib.metadata.version("inflight")
    parser.add_argument("--version", action="version", version=f"inflight-operator {version}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
