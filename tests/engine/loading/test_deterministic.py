from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.errors import CapabilityError
from kernels import cpu, deterministic
from tests.support.engines import load_engine


def test_it_is_off_unless_asked_for(moe_checkpoint: Path) -> None:
    engine = load_engine(moe_checkpoint)
    assert not engine.settings.engine.deterministic
    assert engine._executor.model.ops is cpu


def test_the_model_and_the_sampler_get_the_deterministic_operations(moe_checkpoint: Path) -> None:
    engine = load_engine(moe_checkpoint, {"engine.deterministic": "true"})
    assert engine._executor.model.ops is deterministic
    assert engine._sampler._ops is deterministic


def test_it_is_refused_on_a_gpu(moe_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(CapabilityError, match=r"engine\.deterministic=true: not available on cuda.*accepted: false"):
        load_engine(moe_checkpoint, {"engine.deterministic": "true", "engine.device": "cuda"})
