"""What pydantic refuses of data from another process, in words for whoever sent it (job files: :mod:`.api.errors`)."""

from __future__ import annotations

from pydantic import ValidationError


def problems(error: ValidationError) -> list[str]:
    """Each problem as ``place: message``, at least one; the place is dotted, and ``body`` when it is the whole."""
    return [f"{'.'.join(map(str, problem['loc'])) or 'body'}: {problem['msg']}" for problem in error.errors()]
