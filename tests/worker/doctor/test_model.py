"""What `millrace doctor` says of the model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.loading import derived_settings
from engine.loading.quantization_error import QuantizationError
from settings import load_settings
from tests.support.devices import SimulatedMemory
from tests.support.tiny_checkpoint import (
    make_bert_checkpoint,
    make_body_checkpoint,
    make_checkpoint,
    make_classifying_decoder,
)
from worker.doctor import model as check_model
from worker.doctor.model import model_findings, quantization_findings
from worker.doctor.report import Finding, Level


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "qwen3")


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    """A checkpoint to spoil."""
    return Path(shutil.copytree(whole, tmp_path / "tiny"))


def found(path: Path | None, **engine: str) -> dict[str, Finding]:
    overrides = {f"engine.{name.replace('__', '.')}": value for name, value in engine.items()}
    overrides |= {"engine.device": "cpu"} if "device" not in engine else {}
    overrides |= {"model.path": str(path)} if path is not None else {}
    return {finding.check: finding for finding in model_findings(load_settings(overrides, environ={}))}


def spoil(path: Path, **tensors: torch.Tensor | None) -> None:
    weights = load_file(path / "model.safetensors")
    for key, tensor in tensors.items():
        name = key.replace("__", ".")
        weights.pop(name)
        if tensor is not None:
            weights[name] = tensor
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def test_a_model_is_told_with_what_fits_beside_it(whole: Path) -> None:
    findings = found(whole, kv_cache__num_blocks="101")

    assert {finding.level for finding in findings.values()} == {Level.OK}
    assert "qwen3, 25 tensors, " in findings["model"].detail
    assert findings["model"].detail.endswith(" in float32")
    assert "holds 1600 tokens (101 blocks): 1 sequences of engine.max_model_len=1024" in findings["fit"].detail
    assert findings["chat template"].detail == "found"


def test_without_a_model_there_is_a_warning_alone() -> None:
    findings = found(None)

    assert list(findings) == ["model"]
    assert findings["model"].level is Level.WARNING


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"model__norm__weight": None}, "tensor model.norm.weight is missing"),
        ({"lm_head__weight": torch.zeros(7, 64)}, "tensor lm_head.weight has shape [7, 64]"),
        ({"model__norm__weight": torch.zeros(64, dtype=torch.int8)}, "has dtype I8; accepted: F32, BF16, F16"),
    ],
)
def test_a_tensor_that_the_loader_would_refuse_fails(
    model: Path, tensors: dict[str, torch.Tensor | None], problem: str
) -> None:
    spoil(model, **tensors)

    findings = found(model)

    assert list(findings) == ["model"]
    assert findings["model"].level is Level.FAILED
    assert problem in findings["model"].detail


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_file_that_is_missing_fails(model: Path, name: str) -> None:
    (model / name).unlink()

    assert found(model)["model"].level is Level.FAILED


def test_a_file_cut_short_fails(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])

    assert "not a valid safetensors file" in found(model)["model"].detail


def test_an_end_token_that_the_model_does_not_have_fails(model: Path) -> None:
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 999_999}))

    assert "eos_token_id 999999 is outside the vocabulary" in found(model)["model"].detail


def test_a_tokenizer_of_another_model_is_a_warning(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3", vocab_size=100)
    (path / "generation_config.json").write_text("{}")

    finding = found(path)["tokenizer"]

    assert finding.level is Level.WARNING
    assert "the model has 100" in finding.detail


def test_a_model_without_a_chat_template_is_a_warning(model: Path) -> None:
    for file in model.glob("chat_template*"):
        file.unlink()
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(config))

    assert found(model)["chat template"].level is Level.WARNING


def test_a_pool_that_does_not_fit_into_memory_fails_with_the_setting(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.loading.kv_pool.free_memory_bytes", lambda: 1000)

    finding = found(whole)["fit"]

    assert finding.level is Level.FAILED
    assert "engine.kv_cache" in finding.detail


def test_a_length_that_the_pool_does_not_hold_fails_with_the_setting(whole: Path) -> None:
    finding = found(whole, kv_cache__num_blocks="3", max_model_len="1000")["fit"]

    assert finding.level is Level.FAILED
    assert "engine.max_model_len=1000" in finding.detail


@pytest.mark.parametrize(("total_bytes", "level"), [(10**10, Level.OK), (10**6, Level.FAILED)])
def test_on_a_gpu_the_pool_is_estimated_and_says_so(
    whole: Path, monkeypatch: pytest.MonkeyPatch, total_bytes: int, level: Level
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    memory = SimulatedMemory(total_bytes)
    monkeypatch.setattr(check_model, "device_memory", lambda device: memory)
    monkeypatch.setattr(derived_settings, "device_memory", lambda device: memory)

    finding = found(whole, device="cuda")["fit"]

    assert finding.level is level
    if level is Level.OK:
        assert finding.detail.endswith("estimated: a worker measures what engine.gpu_memory_utilization=0.9 leaves")
    else:
        assert "engine.gpu_memory_utilization" in str(finding.fix)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (make_bert_checkpoint, "no head: /v1/embeddings, /v1/score, /v1/rerank only"),
        (make_body_checkpoint, "no head: /v1/embeddings, /v1/score, /v1/rerank only"),
        (
            partial(make_bert_checkpoint, head="classes", family="roberta", num_labels=1),
            "a head of one class, which scores pairs: /v1/score, /v1/rerank, /classify only",
        ),
        (partial(make_classifying_decoder, num_labels=3), "a head of 3 classes: /classify only"),
    ],
)
def test_a_model_that_generates_nothing_says_what_it_serves(
    tmp_path: Path, make: Callable[[Path], Path], said: str
) -> None:
    findings = found(make(tmp_path))

    assert findings["endpoints"].detail == said
    assert "chat template" not in findings
    assert {finding.level for finding in findings.values()} == {Level.OK}


def test_an_encoder_with_a_tensor_too_few_fails(tmp_path: Path) -> None:
    spoil(make_bert_checkpoint(tmp_path), encoder__layer__0__output__dense__bias=None)

    assert "encoder.layer.0.output.dense.bias is missing" in found(tmp_path)["model"].detail


def compared(path: Path, **engine: str) -> Finding:
    overrides = {"model.path": str(path), "engine.device": "cpu", "engine.kv_cache.num_blocks": "101"}
    overrides |= {f"engine.{name}": value for name, value in engine.items()}
    [finding] = quantization_findings(load_settings(overrides, environ={}))
    return finding


def test_what_int8_costs_is_told_in_figures(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_model, "measure_quantization_error", lambda _: QuantizationError(0.25, 0.0314, 0.96875))

    finding = compared(whole, quantization="int8")

    assert (finding.level, finding.fix) == (Level.OK, None)
    assert "off by 0.031 on average and 0.250 at most" in finding.detail
    assert finding.detail.endswith("the likeliest token is the same in 96.9% of rows")


def test_full_weights_have_nothing_to_be_compared_with(whole: Path) -> None:
    finding = compared(whole)

    assert finding.level is Level.WARNING
    assert finding.fix == "set engine.quantization=int8 or int4"


def test_a_cpu_without_8_bit_products_cannot_compare(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)

    finding = compared(whole, quantization="int8")

    assert finding.level is Level.FAILED
    assert "AVX-512 VNNI" in finding.detail


def test_an_encoder_cannot_be_compared(tmp_path: Path) -> None:
    finding = compared(make_bert_checkpoint(tmp_path), quantization="int8")

    assert finding.level is Level.FAILED
    assert "encoder" in finding.detail
