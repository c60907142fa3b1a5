"""Quantised checkpoints of every layout and family against transformers with the same weights, dequantised."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, PreTrainedModel
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

from engine.checkpoint.weights import Checkpoint
from engine.errors import CheckpointError
from engine.model_interface import LogitsResult, ModelInterface
from engine.models.load import check_decoder
from tests.support.engines import load_engine
from tests.support.quantised_checkpoint import METHODS, quantise_checkpoint
from tests.support.tiny_checkpoint import decoder_config, make_checkpoint, make_model
from tests.support.tiny_families import Family

# Both sides multiply the same float32 weights: what is left is the order of their sums, as without quantisation.
LOGITS_TOLERANCE = 1e-4
# 8-bit activations: a value near the middle of two integers may be rounded to either, and each that is moves a product
# by one step. Rounding itself is on both sides.
MEAN_TOLERANCE_OF_INTEGERS = 0.02  # of the logits' standard deviation
# Where only our side rounds activations, with steps of a 127th of a row's largest: some 0.7 % of a product, of which a
# token passes 14 to its logits, independent of each other: 0.7 % * sqrt(14), twice.
MEAN_TOLERANCE_OF_ROUNDING = 0.06
FAMILIES: dict[str, tuple[Family, dict[str, Any]]] = {
    "llama": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 2}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "moe-mixed-layers": ("qwen3_moe", {"mlp_only_layers": [1]}),
}
# What these have of their own, in layouts that each treat it in their own way: biases, which GPTQ files of other
# families have as zeros; projections that the file has stacked; other names of experts and of their router.
MORE_FAMILIES: dict[str, tuple[Family, dict[str, Any]]] = {
    "qwen2-biases": ("qwen2", {}),
    "phi3-stacked": ("phi3", {}),
    "phi3-half-rotated": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    "mixtral": ("mixtral", {}),
}
CASES = [
    *((method, family) for method in METHODS for family in FAMILIES),
    *((method, "qwen2-biases") for method in ("gptq", "gptq_order", "awq")),
    *((method, "phi3-stacked") for method in ("gptq_order", "w4a16", "fp8_blocks")),
    *((method, "phi3-half-rotated") for method in ("gptq_order", "awq", "w4a16_zeros", "fp8_blocks", "int8")),
    *((method, "mixtral") for method in ("gptq_order", "w4a16")),
]


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(256) for _ in range(length)] for length in (1, 9, 40)]


def last_logits(interface: ModelInterface, prompt: list[int]) -> torch.Tensor:
    """Logits of the last token, which was decoded; of those before it, which were prefilled, only the cache is seen."""
    if len(prompt) > 1:
        interface.prefill("p", prompt[:-1])
        result = interface.decode("p", prompt[-1], len(prompt) - 1)
    else:
        result = interface.prefill("p", prompt)
    interface.release("p")
    assert isinstance(result, LogitsResult)
    return result.logits


def rounding(module: torch.nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    (x,) = args
    scales = x.abs().amax(-1, keepdim=True) / 127
    return ((x / scales).round() * scales,)


@pytest.mark.parametrize(("method", "family"), CASES)
def test_logits_are_transformers_with_the_weights_dequantised(method: str, family: str, tmp_path: Path) -> None:
    model_type, options = (FAMILIES | MORE_FAMILIES)[family]
    if method == "w4a16_head" and options.get("tie_word_embeddings"):
        pytest.skip("a tied head is the embedding, which no layout quantises")
    plain = make_checkpoint(tmp_path / "plain", model_type, **options)
    quantised, dense = quantise_checkpoint(plain, tmp_path, METHODS[method], num_files=3)
    reference = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()
    rounds_integers = method == "w8a8"
    if rounds_integers and model_type != "qwen3_moe":  # whose experts are no modules
        for name, module in reference.named_modules():
            if METHODS[method].is_quantised(name):
                module.register_forward_pre_hook(rounding)
    interface = load_engine(quantised, {"engine.dtype": "float32"}).model_interface
    for prompt in prompts():
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits[0, -1]
        actual = last_logits(interface, prompt)
        if rounds_integers:
            bound = MEAN_TOLERANCE_OF_ROUNDING if model_type == "qwen3_moe" else MEAN_TOLERANCE_OF_INTEGERS
            assert float((actual - expected).abs().mean()) < bound * float(expected.std())
        else:
            torch.testing.assert_close(actual, expected, atol=LOGITS_TOLERANCE, rtol=0)


def with_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def respoil(path: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with_tensors(path, lambda tensors: tensors.update({name: change(tensors[name])}))


@pytest.mark.parametrize(
    ("method", "tensor", "change", "message"),
    [
        # Written as the other of GPTQ's formats has it: zero points of 8.
        ("gptq", "qzeros", lambda t: t + 0x11111111, "zero point 9; accepted: 8, since .* sym is true"),
        ("gptq_8bit", "qzeros", lambda t: t + 0x01010101, "zero point 129; accepted: 128, since .* sym is true"),
        ("gptq_order", "g_idx", lambda t: t.clamp(min=1), "groups of unequal sizes; accepted: 16 inputs each"),
        ("gptq_order", "g_idx", lambda t: t.flip(0), "fused|multiplied together, but their g_idx differ"),
        ("w4a16", "weight_shape", lambda t: t + 1, r"weight_shape is \[65, 65\]; config.json asks for \[64, 64\]"),
        (
            "fp8_static",
            "weight",
            lambda t: torch.full_like(t.float(), torch.nan).to(t.dtype),
            "q_proj.weight holds NaN; accepted: finite weights",
        ),
    ],
)
def test_values_that_mean_nothing_are_refused_by_name(
    method: str, tensor: str, change: Callable[[torch.Tensor], torch.Tensor], message: str, tmp_path: Path
) -> None:
    plain = make_checkpoint(tmp_path / "plain", "llama")
    quantised, _ = quantise_checkpoint(plain, tmp_path, METHODS[method])
    respoil(quantised, f"model.layers.1.self_attn.q_proj.{tensor}", change)
    with pytest.raises(CheckpointError, match=message):
        load_engine(quantised)


def add_zero_biases(tensors: dict[str, torch.Tensor]) -> None:
    """As AutoGPTQ writes them, for every layer that has none: hugging-quants/Meta-Llama-3.1-8B-Instruct-GPTQ-INT4."""
    for name, scales in list(tensors.items()):
        if name.endswith(".scales"):
            tensors.setdefault(name.replace(".scales", ".bias"), torch.zeros(scales.shape[1], dtype=torch.float16))


def test_biases_of_zeros_beside_true_ones_change_nothing(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "qwen2")
    quantised, _ = quantise_checkpoint(plain, tmp_path, METHODS["gptq"])
    expected = last_logits(load_engine(quantised).model_interface, prompts()[1])
    with_tensors(quantised, add_zero_biases)
    assert torch.equal(last_logits(load_engine(quantised).model_interface, prompts()[1]), expected)


def test_a_bias_of_zeros_is_none_and_any_other_is_refused(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "llama")
    quantised, _ = quantise_checkpoint(plain, tmp_path, METHODS["gptq"])
    expected = last_logits(load_engine(quantised).model_interface, prompts()[1])
    with_tensors(quantised, add_zero_biases)
    assert torch.equal(last_logits(load_engine(quantised).model_interface, prompts()[1]), expected)

    name = "model.layers.1.mlp.up_proj.bias"
    respoil(quantised, name, lambda bias: bias + 0.5)
    with pytest.raises(CheckpointError, match=rf"tensor {name} holds 0\.5; accepted: no bias, or zeros"):
        load_engine(quantised)


@pytest.mark.parametrize(
    ("method", "scheme", "names"),
    [
        ("fp8_static", "static", ("self_attn.k_scale", "self_attn.v_scale")),
        ("fp8_static", "static", ("self_attn.kv_scale",)),
        ("fp8_dynamic", {"num_bits": 8, "type": "float"}, ("self_attn.k_scale", "self_attn.v_scale")),
        ("w4a16", {"num_bits": 8}, ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale")),
    ],
)
def test_scales_of_a_kv_cache_change_nothing_where_they_are_announced(
    method: str, scheme: Any, names: tuple[str, ...], tmp_path: Path
) -> None:
    plain = make_checkpoint(tmp_path / "plain", "llama")
    quantised, _ = quantise_checkpoint(plain, tmp_path, METHODS[method])
    expected = last_logits(load_engine(quantised).model_interface, prompts()[1])
    scales = {f"model.layers.{layer}.{name}": torch.tensor([0.03]) for layer in (0, 1) for name in names}
    with_tensors(quantised, lambda tensors: tensors.update(scales))
    with pytest.raises(CheckpointError, match=f"no place for tensor model.layers.0.{names[0]}"):
        load_engine(quantised)

    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = scheme
    (quantised / "config.json").write_text(json.dumps(config))
    assert torch.equal(last_logits(load_engine(quantised).model_interface, prompts()[1]), expected)


@pytest.mark.parametrize(("method", "tensor"), [("gptq_order", "g_idx"), ("w4a16_zeros", "weight_g_idx")])
def test_reordered_inputs_without_their_groups_are_refused(method: str, tensor: str, tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "llama")
    quantised, _ = quantise_checkpoint(plain, tmp_path, METHODS[method])
    name = f"model.layers.1.mlp.down_proj.{tensor}"
    with_tensors(quantised, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"tensor {name} is missing, and config.json says .* reordered"):
        load_engine(quantised)


def test_layers_that_are_fused_must_be_quantised_alike(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "llama")
    config = METHODS["w4a16"].config | {"ignore": ["lm_head", "model.layers.0.self_attn.k_proj"]}
    method = replace(METHODS["w4a16"], config=config, is_quantised=lambda m: m.endswith("_proj") and "k_proj" not in m)
    quantised, _ = quantise_checkpoint(plain, tmp_path, method)
    message = r"q_proj \(int4, groups of 32, packed\) and .*k_proj \(unquantised\) are multiplied together"
    with pytest.raises(CheckpointError, match=message):
        load_engine(quantised)


@pytest.mark.parametrize("setting", ["engine.deterministic", "engine.dtype"])
@pytest.mark.parametrize("method", ["gptq_order", "w8a8", "fp8_blocks"])
def test_other_kernels_are_near_the_same_logits(method: str, setting: str, tmp_path: Path) -> None:
    value = "true" if setting == "engine.deterministic" else "bfloat16"
    # Random routers are near ties: in bfloat16 2 to 5 of 40 prompts meet other experts, quantised or not.
    plain = make_checkpoint(tmp_path / "plain", "llama" if value == "bfloat16" else "qwen3_moe")
    quantised, _ = quantise_checkpoint(plain, tmp_path, METHODS[method])
    interface = load_engine(quantised, {"engine.dtype": "float32"} | {setting: value}).model_interface
    expected = load_engine(quantised, {"engine.dtype": "float32"}).model_interface
    for prompt in prompts():
        actual, wanted = last_logits(interface, prompt), last_logits(expected, prompt)
        error = (actual - wanted).abs().mean() / wanted.std()
        assert float(error) < (0.05 if value == "bfloat16" else 1e-3 if method != "w8a8" else 0.02)


NUM_EXPERTS = 8


def decide_routers(path: Path) -> None:
    """Let the first elements of a token's embedding, far larger than the rest, choose its two experts in each layer."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        embedding = tensors["model.embed_tokens.weight"]
        ids = torch.arange(embedding.shape[0])
        first, second = ids % NUM_EXPERTS, (ids + 1 + ids // NUM_EXPERTS % (NUM_EXPERTS - 1)) % NUM_EXPERTS
        embedding[:, :NUM_EXPERTS] = 0
        embedding[ids, first], embedding[ids, second] = 32.0, 28.0  # layers add some 3
        for name, gate in tensors.items():
            if name.endswith("mlp.gate.weight"):
                gate.copy_(torch.eye(*gate.shape) / 2)

    with_tensors(path, change)


@pytest.mark.parametrize("method", ["gptq_order", "awq", "w4a16", "w8a8", "fp8_blocks"])
def test_experts_in_bfloat16_are_near_where_rounding_chooses_none(method: str, tmp_path: Path) -> None:
    """Random routers are near ties, and in bfloat16 some prompts meet other experts; here none can."""
    plain = make_checkpoint(tmp_path / "plain", "qwen3_moe", num_experts=NUM_EXPERTS)
    decide_routers(plain)
    quantised, dense = quantise_checkpoint(plain, tmp_path, METHODS[method])
    reference = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()
    interface = load_engine(quantised, {"engine.dtype": "bfloat16"}).model_interface
    chosen = set()
    for prompt in prompts():
        with torch.inference_mode():
            result = reference(torch.tensor([prompt]), output_router_logits=True)
        for router_logits in result.router_logits:
            ranked = router_logits.sort(dim=1, descending=True)
            # Others are chosen where bfloat16 is off by half of this: its steps here are a 64th.
            assert float((ranked.values[:, 1] - ranked.values[:, 2]).min()) > 1
            chosen |= set(ranked.indices[:, :2].flatten().tolist())
        expected, actual = result.logits[0, -1], last_logits(interface, prompt)
        assert float((actual - expected).abs().mean()) < 0.02 * float(expected.std())
    assert chosen == set(range(NUM_EXPERTS))


BLOCK = (16, 32)  # rows and inputs
FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}


def round_to_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[..., N, K] -> e4m3, scales [..., R, G], and what they mean in float32."""
    rows, width = weight.shape[-2:]
    spare = (0, -width % BLOCK[1], 0, -rows % BLOCK[0])
    padded = torch.nn.functional.pad(weight, spare)
    tiles = padded.reshape(*weight.shape[:-2], -1, BLOCK[0], padded.shape[-1] // BLOCK[1], BLOCK[1])
    scales = tiles.abs().amax((-3, -1)) / 448
    spread = scales.repeat_interleave(BLOCK[0], -2)[..., :rows, :].repeat_interleave(BLOCK[1], -1)[..., :width]
    values = (weight / spread).to(torch.float8_e4m3fn)
    return values, scales, values.float() * spread


def save_fp8_experts(path: Path, family: Family, *, by_family: bool = True) -> PreTrainedModel:
    """A checkpoint that transformers' FP8 modules wrote, with weights by the family's names or by its modules' own;
    returns the same model dequantised.
    """
    make_checkpoint(path, family)
    reference, quantised = make_model(family), make_model(family)
    replace_with_fp8_linear(quantised, ["lm_head"], FineGrainedFP8Config(weight_block_size=BLOCK))
    plain, state = dict(reference.named_parameters()), {}
    for scale in [name for name in quantised.state_dict() if name.endswith("_scale_inv")]:
        name = scale.removesuffix("_scale_inv")
        state[name], state[scale], plain[name].data = round_to_blocks(plain[name].detach())
    quantised.load_state_dict(state, strict=False, assign=True)
    quantised.save_pretrained(path, save_original_format=by_family)
    with_config(path, lambda config: config.update(quantization_config=FP8_CONFIG))
    return reference


def with_config(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "granitemoeshared"])
def test_experts_with_scales_in_one_tensor_are_those_of_transformers(family: Family, tmp_path: Path) -> None:
    reference = save_fp8_experts(tmp_path / "fp8", family)
    assert any(
        name.endswith("experts.gate_up_proj_scale_inv") for name in load_file(tmp_path / "fp8/model.safetensors")
    )
    interface = load_engine(tmp_path / "fp8", {"engine.dtype": "float32"}).model_interface
    for prompt in prompts():
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits[0, -1]
        torch.testing.assert_close(last_logits(interface, prompt), expected, atol=LOGITS_TOLERANCE, rtol=0)


def split_scales(tensors: dict[str, torch.Tensor]) -> None:
    """As files have them of which each expert has scales of its own."""
    for name in [name for name in tensors if name.endswith("_proj_scale_inv")]:
        module, _, part = name.removesuffix("_proj_scale_inv").rpartition(".")
        own = part.split("_")
        for expert, scales in enumerate(tensors.pop(name)):
            for half, rows in zip(own, scales.chunk(len(own)), strict=True):
                tensors[f"{module}.{expert}.{half}_proj.weight_scale_inv"] = rows.contiguous()


def test_fused_experts_are_bit_for_bit_those_of_one_tensor_an_expert(tmp_path: Path) -> None:
    save_fp8_experts(tmp_path / "scales", "qwen3_moe")
    save_fp8_experts(tmp_path / "split", "qwen3_moe")
    with_tensors(tmp_path / "split", split_scales)
    save_fp8_experts(tmp_path / "whole", "qwen3_moe", by_family=False)
    layouts = {name: load_file(tmp_path / name / "model.safetensors") for name in ("split", "scales", "whole")}
    layer = "model.layers.0.mlp.experts"
    assert f"{layer}.3.up_proj.weight_scale_inv" in layouts["split"]
    assert {f"{layer}.3.up_proj.weight", f"{layer}.gate_up_proj_scale_inv"} <= layouts["scales"].keys()
    assert layouts["whole"][f"{layer}.gate_up_proj"].shape == (8, 64, 64)
    logits = [
        last_logits(load_engine(tmp_path / name, {"engine.dtype": "float32"}).model_interface, prompts()[2])
        for name in layouts
    ]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (
            "qwen3_moe",
            {"activation_scheme": "static", "weight_block_size": None},
            "gate_up_proj_scale_inv: scales of all experts; accepted: quant_method fp8 with activation_scheme dynamic",
        ),
        ("qwen3_moe", {"weight_block_size": [24, 32]}, "64 rows in blocks of 24; accepted: whole blocks"),
        (
            "qwen3_moe",
            {"weight_block_size": [32, 16]},
            r"scale_inv has shape \[8, 4, 2\]; config.json asks for \[8, 2, 4\]",
        ),
        ("qwen3_moe", {"modules_to_not_convert": ["mlp.experts"]}, "leaves out 'mlp.experts'"),
        (
            "granitemoe",
            None,
            "input_linear: quantised experts in one tensor; accepted: unquantised ones, or e4m3 beside "
            "model.layers.0.block_sparse_moe.experts.gate_up_proj_scale_inv",
        ),
    ],
)
def test_fused_experts_of_another_kind_are_refused_by_name(
    family: Family, change: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    save_fp8_experts(tmp_path / "fp8", family)
    if change is not None:
        # Every other module unquantised in this file: what is refused is the experts.
        with_config(tmp_path / "fp8", lambda config: config["quantization_config"].update(change))
        with_tensors(tmp_path / "fp8", keep_experts_quantised)
    else:
        module = "model.layers.0.block_sparse_moe"
        with_tensors(
            tmp_path / "fp8",
            lambda tensors: tensors.update(
                {f"{module}.input_linear.weight_scale": tensors.pop(f"{module}.experts.gate_up_proj_scale_inv")}
            ),
        )
    with Checkpoint.open(tmp_path / "fp8") as checkpoint, pytest.raises(CheckpointError, match=message):
        check_decoder(decoder_config(tmp_path / "fp8"), checkpoint)


def keep_experts_quantised(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.endswith(".weight_scale_inv")]:
        del tensors[name]
        weight = name.removesuffix("_scale_inv")
        tensors[weight] = tensors[weight].float()


def test_quantised_checkpoints_are_loaded_without_a_compiler(tmp_path: Path) -> None:
    paths = []
    for method in ("gptq_order", "awq", "w4a16_zeros", "fp8_static"):
        plain = make_checkpoint(tmp_path / method / "plain", "qwen3_moe")
        paths.append(str(quantise_checkpoint(plain, tmp_path / method, METHODS[method])[0]))
    save_fp8_experts(tmp_path / "fp8", "qwen3_moe")
    code = """
import sys
from pathlib import Path

from engine.checkpoint.model_config import read_config
from engine.checkpoint.weights import Checkpoint
from engine.loading.load import load_engine
from engine.models.load import check_decoder
from settings import load_settings

for path in sys.argv[1:]:
    with Checkpoint.open(Path(path)) as checkpoint:
        check_decoder(read_config(Path(path)), checkpoint)
    values = {"model.path": path, "engine.device": "cpu", "engine.kv_cache.num_blocks": "8"}
    load_engine(load_settings(values, environ={}))
    assert "torch._dynamo" not in sys.modules, path  # 66 MB of Triton's library come with it
"""
    command = [sys.executable, "-c", code, *paths, str(tmp_path / "fp8")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
