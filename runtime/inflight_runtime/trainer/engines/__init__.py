"""Trainer engines by name. One that needs more than one process per model plugs in here."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from inflight_runtime.garbage import loading_modules

if TYPE_CHECKING:
    from inflight_runtime.trainer.contract import TrainerEngine

ENGINES: Final = {
    "deepspeed": "inflight_runtime.trainer.engines.deepspeed:DeepSpeedEngine",
    "fsdp2": "inflight_runtime.trainer.engines.fsdp2:Fsdp2Engine",
    "single": "inflight_runtime.trainer.engines.single:SingleEngine",
}
"""``module:Class`` of each engine, imported only when it is used."""


def make_engine(name: str) -> TrainerEngine:
    """Make an engine, not initialised yet.

    Raises:
        ValueError: there is no engine of this name.
    """
    if name not in ENGINES:
        raise ValueError(f"trainer engine {name!r} is not known: expected one of {', '.join(sorted(ENGINES))}")
    module, _, attribute = ENGINES[name].partition(":")
    with loading_modules():
        engine_class = getattr(import_module(module), attribute)
    engine: TrainerEngine = engine_class()
    return engine
