"""Fault switches, for tests only: a server that fails in one chosen way, from ``InferenceConfig.faults``."""

from __future__ import annotations

import os
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

DIED_ON_PURPOSE: Final = 86
"""Exit status of a server that a switch has killed."""


class Faults(BaseModel):
    """What goes wrong; everything off by default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    delay_update_s: float = Field(default=0.0, ge=0)
    """Seconds slept, generating on, after an update has been received."""
    die_in_transfer: bool = False
    """The process is gone after the first bucket of an update."""
    corrupt_receive: bool = False
    """One byte of what was received is flipped before the digests are checked."""
    refuse_commit: bool = False
    """Commits fail half-way: some tensors are in place, the server is broken."""
    drop_generate_every: int = Field(default=0, ge=0)
    """Each n-th generate request loses its connection without an answer; 0: never."""
    hang_generate_every: int = Field(default=0, ge=0)
    """Each n-th generate request is never answered; 0: never."""
    slow_token_s: float = Field(default=0.0, ge=0)
    """Seconds slept at each token."""
    die_after_requests: int = Field(default=0, ge=0)
    """The process is gone at this generate request; 0: never."""


def die() -> None:
    """End the process at once, as a crash would: nothing is flushed, nobody is told."""
    os._exit(DIED_ON_PURPOSE)
