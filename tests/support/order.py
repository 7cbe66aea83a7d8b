"""The order in which files of tests begin."""

from __future__ import annotations

from collections.abc import Sequence

import pytest


def longest_first(items: list[pytest.Item], files: Sequence[str]) -> None:
    """Begin with these files, in this order.

    Workers take whole files (``--dist loadfile``), so a long one that begins last is waited for by all the others.
    """
    places = {name: place for place, name in enumerate(files)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
