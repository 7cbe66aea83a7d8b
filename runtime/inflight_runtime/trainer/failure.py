"""What a trainer ends with when it cannot go on: the exit codes, and the reason in a form that the launcher finds."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Final

EXIT_FAILED: Final = 1
EXIT_BAD_INPUT: Final = 2
"""Nothing that starts the trainer again mends this."""
EXIT_SUPERSEDED: Final = 3

_ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"


def tell_launcher(reason: str) -> None:
    """Leave the reason of this rank's end where torch's agent reads it, if one has started this process."""
    path = os.environ.get(_ERROR_FILE)
    if not path:
        return
    part = Path(f"{path}.part")
    with contextlib.suppress(OSError):  # the log has the reason anyway
        part.write_text(json.dumps({"message": reason, "timestamp": int(time.time())}))
        part.replace(path)  # the agent fails on half a file
