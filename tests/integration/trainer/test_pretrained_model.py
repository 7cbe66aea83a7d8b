"""The single engine on a real pretrained model."""

from __future__ import annotations

from pathlib import Path

from inflight_runtime.config.roles import CheckpointConfig, ModelFiles, TrainerConfig
from inflight_runtime.trainer.engines.single import SingleEngine
from support.models import smollm2_model


def test_a_pretrained_model_passes_the_check_of_shared_prefixes(tmp_path: Path) -> None:
    model = str(smollm2_model())
    config = TrainerConfig(
        job="check",
        coordinator_url="http://127.0.0.1:1",
        token_file=tmp_path / "token",
        model=ModelFiles(path=model, tokenizer=model, max_length=128),
        steps=1,
        groups_per_step=2,
        group_size=2,
        max_staleness=1,
        max_tokens=8,
        micro_batch_tokens=512,
        checkpoint=CheckpointConfig(dir=tmp_path),
        log_dir=tmp_path,
    )
    engine = SingleEngine()
    assert engine.init(config, None, 0).parameters == 134_515_008
    engine.close()
