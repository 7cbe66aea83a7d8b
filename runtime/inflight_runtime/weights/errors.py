"""What can go wrong with a weight update."""

from __future__ import annotations


class WeightTransferError(RuntimeError):
    """Weights did not arrive (peer gone, deadline passed, bad request); nothing of the model was touched."""


class DigestMismatchError(WeightTransferError):
    """Weights arrived and are not the ones announced; they must not be committed."""


class StaleEpochError(RuntimeError):
    """A newer trainer has taken over; this one must stop publishing."""
