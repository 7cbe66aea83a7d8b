"""Loads a job's environment in a process of its own, for :mod:`.checks`: user code may print, hang, exit or crash.

``python -m inflight_runtime.config.environment_probe SPEC_FILE RESULT_FILE``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from inflight_runtime.config.roles import EnvironmentSpec, load_role_config


def main() -> None:
    """Read an ``EnvironmentSpec`` from one file and write what came of it to the other.

    Written is ``{"error": ""}`` or why it cannot be used, with the number of problems (``size``, null for endless) and
    of held-out ones (``eval_size``). Nothing is written when user code ends the process.
    """
    spec = load_role_config(EnvironmentSpec, Path(sys.argv[1]))
    result = Path(sys.argv[2])
    # Imported after the spec is read, so that an installation without the runtime says so in one place.
    from inflight_runtime.actor.environments import dataset_sizes  # noqa: PLC0415
    from inflight_runtime.actor.loading import EnvironmentLoadError, load_environment  # noqa: PLC0415

    try:
        environment = load_environment(spec)
        size, eval_size = dataset_sizes(environment)
    except EnvironmentLoadError as error:
        result.write_text(json.dumps({"error": str(error)}))
        return
    result.write_text(json.dumps({"error": "", "size": size, "eval_size": eval_size}))
    environment.close()


if __name__ == "__main__":
    main()
