"""``python -m inflight_operator``: runs the operator with settings from the environment (:mod:`.settings`)."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from inflight_operator.logs import configure
from inflight_operator.settings import SettingsError, settings_from


def main() -> int:
    """Run until ended; 2 when it cannot start."""
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


if __name__ == "__main__":
    sys.exit(main())
