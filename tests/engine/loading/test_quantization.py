from __future__ import annotations

from pathlib import Path

import pytest
import structlog
import torch

from engine.errors import CapabilityError
from engine.models.decoder import weights_bytes
from kernels import cpu, int8
from tests.support.engines import greedy_request, load_engine, run_all, tokens_of
from tests.support.needs_vnni import needs_vnni

PROMPT = list(range(40, 90))


def test_it_is_off_unless_asked_for(moe_checkpoint: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        engine = load_engine(moe_checkpoint)
    assert engine._executor.model.ops is cpu
    assert not [entry for entry in logs if entry["event"] == "quantization_error"]


@needs_vnni
def test_its_error_is_measured_and_logged_at_load(moe_checkpoint: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        engine = load_engine(moe_checkpoint, {"engine.quantization": "int8"})
    assert engine._executor.model.ops is int8
    (entry,) = [entry for entry in logs if entry["event"] == "quantization_error"]
    assert 0 < entry["mean_error"] < entry["max_error"] < 1
    assert entry["mean_error"] < 0.1
    assert entry["same_greedy_tokens"] > 0.8


@needs_vnni
def test_its_weights_take_about_a_quarter_of_float32(moe_checkpoint: Path) -> None:
    plain = weights_bytes(load_engine(moe_checkpoint)._executor.model)
    model = load_engine(moe_checkpoint, {"engine.quantization": "int8"})._executor.model
    embedding = model.embed_tokens.nbytes
    assert weights_bytes(model) - embedding < 0.5 * (plain - embedding)  # scales weigh much in so small a model


@needs_vnni
def test_a_request_gets_the_same_tokens_alone_and_beside_others(moe_checkpoint: Path) -> None:
    requests = [greedy_request(str(index), PROMPT[index:], 12) for index in range(6)]
    together = run_all(load_engine(moe_checkpoint, {"engine.quantization": "int8"}), requests)
    for request in requests:
        alone = run_all(load_engine(moe_checkpoint, {"engine.quantization": "int8"}), [request])
        assert tokens_of(alone[request.request_id]) == tokens_of(together[request.request_id])


@needs_vnni
def test_it_is_refused_together_with_deterministic(moe_checkpoint: Path) -> None:
    with pytest.raises(CapabilityError, match=r"engine\.quantization=int8.*engine\.deterministic=true.*accepted"):
        load_engine(moe_checkpoint, {"engine.quantization": "int8", "engine.deterministic": "true"})


def test_it_is_refused_on_a_cpu_whose_sums_would_saturate(
    moe_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    with pytest.raises(CapabilityError, match=r"engine\.quantization=int8: .*AVX-512 VNNI.*quantization=none"):
        load_engine(moe_checkpoint, {"engine.quantization": "int8"})
