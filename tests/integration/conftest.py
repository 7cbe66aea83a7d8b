"""What all tests with real processes share."""

from __future__ import annotations

import pytest

from support.order import longest_first

LONGEST_FIRST = (
    "test_ranks.py",
    "test_ranks_vllm.py",
    "test_vllm.py",
    "test_staleness.py",
    "test_process.py",
    "test_contract.py",
    "test_faults.py",
    "test_reference_faults.py",
    "test_deepspeed.py",
    "test_fsdp2.py",
    "test_rank_exits.py",
    "test_executor.py",
    "test_actor_process.py",
    "test_stop_and_resume.py",
    "test_synchronous.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort; whole runs take longest."""
    longest_first(items, LONGEST_FIRST)
