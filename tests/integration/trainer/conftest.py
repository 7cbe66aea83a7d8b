"""What tests of trainers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.forked_ranks import ForkedRanks, forked_ranks


@pytest.fixture(scope="session")
def forked() -> Iterator[ForkedRanks]:
    """Starts programs of several ranks without an import of torch for each."""
    with forked_ranks() as running:
        yield running
