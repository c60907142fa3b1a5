from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.errors import CapabilityError
from tests.support.engines import load_engine
from tests.support.tiny_checkpoint import VOCAB_SIZE, make_checkpoint


def test_logits_are_float32_whatever_the_models_dtype(tmp_path: Path) -> None:
    model = load_engine(make_checkpoint(tmp_path, "qwen3"), {"engine.dtype": "bfloat16"})._executor.model
    logits = model.logits(torch.ones(3, model.config.hidden_size, dtype=torch.bfloat16))
    assert (logits.dtype, tuple(logits.shape)) == (torch.float32, (3, VOCAB_SIZE))
    with pytest.raises(CapabilityError, match="no lm_head"):
        replace(model, lm_head=None).logits(torch.ones(1, model.config.hidden_size, dtype=torch.bfloat16))
