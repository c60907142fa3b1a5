"""`millrace quantize` writes what this engine, compressed-tensors and transformers read; int4 at load rounds alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engine.engine import Engine
from engine.errors import CapabilityError, CheckpointError
from engine.loading.quantize import FORMATS, quantise_checkpoint
from engine.model_interface import LogitsResult
from engine.request import ClassificationRequest
from tests.support.engines import greedy_request, load_engine, run_all, tokens_of
from tests.support.tiny_checkpoint import make_bert_checkpoint, make_checkpoint, make_classifying_decoder
from tests.support.tiny_families import Family

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 200, 100]
FAMILIES: list[Family] = ["llama", "qwen2", "phi3", "qwen2_moe", "qwen3_moe", "mixtral"]
FLOAT32 = {"engine.dtype": "float32"}


def logits_of(engine: Engine) -> torch.Tensor:
    result = engine.model_interface.prefill("p", PROMPT)
    assert isinstance(result, LogitsResult)
    return result.logits


def dequantised(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What was written, read by its definition."""
    dense = {}
    for name, tensor in tensors.items():
        module = name.rpartition(".")[0]
        if name.endswith(".weight_packed"):
            rows, width = tensors[f"{module}.weight_shape"].tolist()
            codes = torch.stack([tensor >> shift & 15 for shift in range(0, 32, 4)], dim=2).view(rows, -1)[:, :width]
            scales = tensors[f"{module}.weight_scale"].float()
            group = width // scales.shape[1]
            dense[f"{module}.weight"] = (codes.float() - 8) * scales.repeat_interleave(group, 1)
        elif f"{module}.weight_scale" in tensors and name.endswith(".weight"):
            dense[name] = tensor.float() * tensors[f"{module}.weight_scale"].float()
        elif "weight_" not in name:
            dense[name] = tensor
    return dense


def all_tensors(path: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", FORMATS)
def test_what_was_written_is_near_and_is_what_the_engine_computes(scheme: str, family: Family, tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", family, max_shard_size="60KB")
    num_bytes = quantise_checkpoint(plain, tmp_path / "out", scheme, 32)

    before, after = all_tensors(plain), dequantised(all_tensors(tmp_path / "out"))
    assert num_bytes == sum(tensor.nbytes for tensor in all_tensors(tmp_path / "out").values())
    assert after.keys() == before.keys()
    for name, weight in before.items():
        if not name.endswith("_proj.weight") and ".experts." not in name:
            assert torch.equal(after[name], weight)
            continue
        grouped = weight.view(len(weight), -1, 32 if scheme == "w4a16" else weight.shape[1])
        largest = grouped.abs().amax(2, keepdim=True)
        step = {"w4a16": largest / 14, "w8a8": largest / 254, "fp8": largest / 2**9 + grouped.abs() / 16}[scheme]
        assert ((after[name].view_as(grouped) - grouped).abs() <= step * 1.001).all()
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    own = reference.state_dict()
    reference.load_state_dict({name: after.get(name, tensor) for name, tensor in own.items()})
    if family == "llama":  # whose tensors transformers names as the files do
        with torch.inference_mode():
            expected = reference(torch.tensor([PROMPT])).logits[0, -1]
        actual = logits_of(load_engine(tmp_path / "out", FLOAT32))
        error = float((actual - expected).abs().mean() / expected.std())
        assert error < (0.05 if scheme == "w8a8" else 1e-5)  # activations of 8 bits: see tests/models/test_quantised.py


@pytest.mark.parametrize("scheme", FORMATS)
def test_transformers_loads_it_and_agrees_on_greedy_tokens(scheme: str, tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "llama")
    quantise_checkpoint(plain, tmp_path / "out", scheme, 32)

    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    engine = load_engine(tmp_path / "out", FLOAT32)

    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0, -1]
        tokens = reference.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    error = float((logits_of(engine) - expected).abs().mean() / expected.std())
    # It rounds activations as w8a8 and fp8 say, the latter with 3 bits of mantissa.
    assert error < {"w4a16": 1e-4, "w8a8": 0.05, "fp8": 0.1}[scheme]
    if scheme == "w4a16":
        outputs = run_all(load_engine(tmp_path / "out", FLOAT32), [greedy_request("r", PROMPT, 8)])
        assert tokens_of(outputs["r"]) == tokens[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("deterministic", ["false", "true"])
def test_int4_at_load_rounds_every_product_but_the_routers(deterministic: str, tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "llama")
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, module in reference.named_modules():
            if name.endswith("_proj") or name == "lm_head":
                scales = module.weight.abs().amax(1, keepdim=True) / 7  # rows of fewer than 128 are one group
                module.weight.copy_((module.weight / scales).round() * scales)
        expected = reference(torch.tensor([PROMPT])).logits[0, -1]

    settings = FLOAT32 | {"engine.quantization": "int4", "engine.deterministic": deterministic}
    torch.testing.assert_close(logits_of(load_engine(plain, settings)), expected, atol=1e-4, rtol=0)


def test_what_cannot_be_quantised_is_refused_by_name(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "qwen3")
    bert = make_bert_checkpoint(tmp_path / "bert")
    quantise_checkpoint(plain, tmp_path / "done", "fp8")

    for source, target, group, message in (
        (plain, tmp_path / "done", 32, "done: is there already"),
        (tmp_path / "done", tmp_path / "new", 32, "quantised already .*float8"),
        (bert, tmp_path / "new", 32, "an encoder; accepted: a decoder"),
        (plain, tmp_path / "new", 64, "down_proj.weight has 96 inputs; accepted: a multiple of the group size"),
    ):
        with pytest.raises(CheckpointError, match=message):
            quantise_checkpoint(source, target, "w4a16", group)
        assert not list(tmp_path.glob("new*"))


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_a_quantised_checkpoint_is_not_rounded_again(quantization: str, tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "qwen3")
    quantise_checkpoint(plain, tmp_path / "out", "fp8")
    with pytest.raises(CapabilityError, match=f"engine.quantization={quantization}: .* quantised already"):
        load_engine(tmp_path / "out", {"engine.quantization": quantization})


def test_only_files_that_are_read_are_copied(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "qwen3")
    (plain / "original").mkdir()
    for name in ("original/consolidated.00.pth", "consolidated.safetensors", "pytorch_model.bin"):
        (plain / name).write_bytes(b"weights that are not read")
    (plain / "original" / "params.json").write_text("{}")
    quantise_checkpoint(plain, tmp_path / "out", "w8a8")
    written = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    left_out = {"original/consolidated.00.pth", "consolidated.safetensors", "pytorch_model.bin"}
    assert written == {str(path.relative_to(plain)) for path in plain.rglob("*") if path.is_file()} - left_out


def test_config_json_says_what_was_done(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "qwen3_moe")
    quantise_checkpoint(plain, tmp_path / "out", "w8a8")
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert said["format"] == "int-quantized"
    assert said["ignore"] == ["lm_head", "re:.*(mlp|block_sparse_moe)\\.(shared_expert_)?gate$"]
    assert said["config_groups"]["group_0"]["input_activations"]["strategy"] == "token"


def test_experts_in_one_tensor_are_refused(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "granitemoe")
    with pytest.raises(CheckpointError, match="a layer's experts are one tensor; accepted: a tensor for each expert"):
        quantise_checkpoint(plain, tmp_path / "out", "w8a8")


def test_a_head_of_classes_stays_as_it_is(tmp_path: Path) -> None:
    plain = make_classifying_decoder(tmp_path / "plain", num_labels=3)
    quantise_checkpoint(plain, tmp_path / "out", "w8a8")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"][0] == "score"
    assert torch.equal(all_tensors(tmp_path / "out")["score.weight"], all_tensors(plain)["score.weight"])
    scored = [
        run_all(load_engine(path, FLOAT32), [ClassificationRequest("a", [PROMPT], "none")])["a"].class_scores[0]
        for path in (plain, tmp_path / "out")
    ]
    assert scored[1].tolist() == pytest.approx(scored[0].tolist(), abs=0.1)
