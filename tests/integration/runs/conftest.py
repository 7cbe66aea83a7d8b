"""Fixtures of the whole-run tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.models import sort_letters_model


@pytest.fixture(scope="session")
def letters_model() -> Path:
    """The warm-started model of examples/sort-letters; read only."""
    return sort_letters_model()
