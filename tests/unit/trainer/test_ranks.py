"""What the ranks of a trainer tell one another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from inflight_runtime.trainer import ranks
from inflight_runtime.trainer.contract import EngineError
from inflight_runtime.trainer.ranks import RankError, fail_together


@pytest.fixture
def other_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception | None], None]:
    """Call it with what goes wrong on rank 0; the next call of :func:`fail_together` is rank 1's."""
    sent: list[Tensor] = []

    def gather(texts: list[Tensor], mine: Tensor, group: Any) -> None:
        sent.append(mine)
        for text, one in zip(texts, [*sent, *sent][:2], strict=True):
            text.copy_(one)

    monkeypatch.setattr(ranks.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(ranks.dist, "all_gather", gather)

    def fail(failure: Exception | None) -> None:
        if failure is None:
            fail_together(None)
            return
        with pytest.raises(type(failure)):
            fail_together(failure)

    return fail


@pytest.mark.parametrize(
    ("failure", "kind", "text"),
    [
        (EngineError("no such model"), EngineError, "rank 0: no such model"),
        (OSError(5, "Input/output error"), RankError, r"rank 0: \[Errno 5\] Input/output error"),
        (MemoryError(), RankError, r"rank 0: MemoryError\(\)"),
        (EngineError("ä" * 5000), EngineError, "rank 0: ä"),
    ],
    ids=["bad input", "a fault that may pass", "no words", "many words"],
)
def test_a_rank_fails_for_the_reason_of_another_and_in_its_kind(
    other_rank: Callable[[Exception | None], None], failure: Exception, kind: type[Exception], text: str
) -> None:
    other_rank(failure)
    with pytest.raises(kind, match=text):
        fail_together(None)


def test_no_rank_fails_where_none_has(other_rank: Callable[[Exception | None], None]) -> None:
    other_rank(None)
    fail_together(None)
