"""Published quantised checkpoints, typed in as config, names and shapes, through the header-only path."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.weights import Checkpoint
from engine.errors import CheckpointError
from engine.loading.kv_pool import expected_weights_bytes
from engine.models.load import check_decoder
from kernels.dispatch import choose_native
from settings import load_settings
from tests.support.tiny_checkpoint import decoder_config
from tests.support.tiny_tokenizer import make_tokenizer
from worker.doctor.model import model_findings
from worker.doctor.report import Level

Tensors = dict[str, tuple[str, tuple[int, ...]]]
Linear = Callable[[str, int, int], Tensors]
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I8": 1, "I32": 4, "I64": 8}
FILE_BYTES = 4 << 30

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN3_4B = QWEN3_8B | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True}
QWEN3_30B = QWEN3_8B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 8,  # of 48 that are alike: 62,000 more tensors, read four times, take 23 s
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
AWQ = {
    "backend": "autoawq",
    "bits": 4,
    "do_fuse": False,
    "exllama_config": None,
    "fuse_max_seq_len": None,
    "group_size": 128,
    "modules_to_fuse": None,
    "modules_to_not_convert": None,
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}
GPTQ = {
    "bits": 4,
    "checkpoint_format": "gptq",
    "damp_percent": 0.01,
    "desc_act": False,
    "group_size": 128,
    "lm_head": False,
    "model_file_base_name": None,
    "model_name_or_path": None,
    "quant_method": "gptq",
    "static_groups": False,
    "sym": True,
    "true_sequential": True,
}
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
_ARGUMENTS: dict[str, Any] = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": None,
    "num_bits": 8,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "channel",
    "symmetric": True,
    "type": "float",
}


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, name: str) -> dict[str, Any]:
    return {
        "config_groups": {
            "group_0": {
                "input_activations": inputs,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": _ARGUMENTS | weights,
            }
        },
        "format": name,
        "global_compression_ratio": 1.463543865167781,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


DYNAMIC = compressed({}, _ARGUMENTS | {"dynamic": True, "observer": None, "strategy": "token"}, "float-quantized")
W4A16 = compressed(
    {"actorder": "weight", "group_size": 128, "num_bits": 4, "strategy": "group", "type": "int"}, None, "pack-quantized"
) | {"sparsity_config": {}, "transform_config": {}, "version": "0.12.3"}


def awq(name: str, rows: int, width: int) -> Tensors:
    return {
        f"{name}.qweight": ("I32", (width, rows // 8)),
        f"{name}.qzeros": ("I32", (width // 128, rows // 8)),
        f"{name}.scales": ("F16", (width // 128, rows)),
    }


def gptq(name: str, rows: int, width: int) -> Tensors:
    return {
        f"{name}.qweight": ("I32", (width // 8, rows)),
        f"{name}.qzeros": ("I32", (width // 128, rows // 8)),
        f"{name}.scales": ("F16", (width // 128, rows)),
        f"{name}.g_idx": ("I32", (width,)),
    }


def fp8(name: str, rows: int, width: int) -> Tensors:
    return {
        f"{name}.weight": ("F8_E4M3", (rows, width)),
        f"{name}.weight_scale_inv": ("BF16", (rows // 128, width // 128)),
    }


def fp8_dynamic(name: str, rows: int, width: int) -> Tensors:
    return {f"{name}.weight": ("F8_E4M3", (rows, width)), f"{name}.weight_scale": ("BF16", (rows, 1))}


def w4a16(name: str, rows: int, width: int) -> Tensors:
    return {
        f"{name}.weight_packed": ("I32", (rows, width // 8)),
        f"{name}.weight_scale": ("BF16", (rows, width // 128)),
        f"{name}.weight_shape": ("I64", (2,)),
    }


# name on the hub -> config.json, its quantization_config, the tensors of a layer, what doctor says of it
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], Linear, str]] = {
    "Qwen/Qwen3-8B-AWQ": (QWEN3_8B | {"torch_dtype": "float16"}, AWQ, awq, "awq: int4, groups of 128, zero points"),
    "Qwen/Qwen3-30B-A3B-GPTQ-Int4": (QWEN3_30B, GPTQ, gptq, "gptq: int4, groups of 128"),
    "Qwen/Qwen3-8B-FP8": (QWEN3_8B, FP8, fp8, "fp8: float8, blocks of 128 x 128, activations float8 a group"),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic": (
        LLAMA_8B,
        DYNAMIC,
        fp8_dynamic,
        "compressed-tensors: float8, one scale a channel, activations float8 a token",
    ),
    "RedHatAI/Qwen3-4B-quantized.w4a16": (QWEN3_4B, W4A16, w4a16, "compressed-tensors: int4, groups of 128"),
}


def tensors_of(config: dict[str, Any], linear: Linear) -> Tensors:
    dtype = {"float16": "F16", "bfloat16": "BF16"}[config["torch_dtype"]]
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    tensors: Tensors = {
        "model.embed_tokens.weight": (dtype, (vocab, hidden)),
        "model.norm.weight": (dtype, (hidden,)),
    }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = (dtype, (vocab, hidden))
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, rows, width in _linears(config):
            tensors |= linear(f"{prefix}.{name}", rows, width)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = (dtype, (hidden,))
        if "head_dim" in config:
            for norm in ("q_norm", "k_norm"):
                tensors[f"{prefix}.self_attn.{norm}.weight"] = (dtype, (config["head_dim"],))
        if "num_experts" in config:
            tensors[f"{prefix}.mlp.gate.weight"] = (dtype, (config["num_experts"], hidden))
    return tensors


def _linears(config: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    q_rows, kv_rows = heads * head_dim, config["num_key_value_heads"] * head_dim
    yield from (("self_attn.q_proj", q_rows, hidden), ("self_attn.o_proj", hidden, q_rows))
    yield from (("self_attn.k_proj", kv_rows, hidden), ("self_attn.v_proj", kv_rows, hidden))
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    prefixes = [f"mlp.experts.{expert}" for expert in range(config.get("num_experts", 0))] or ["mlp"]
    for prefix in prefixes:
        yield from ((f"{prefix}.{part}_proj", inner, hidden) for part in ("gate", "up"))
        yield (f"{prefix}.down_proj", hidden, inner)


def write_headers(path: Path, tensors: Tensors) -> int:
    """Safetensors files with holes for the data, and their index; answers the bytes of the data."""
    places: dict[str, str] = {}
    header: dict[str, Any] = {}
    end, total, number = 0, 0, 1

    def write() -> None:
        name = f"model-{number:05}.safetensors"
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (path / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
        places.update(dict.fromkeys(header, name))

    for name, (dtype, shape) in tensors.items():
        size = ITEM_BYTES[dtype] * math.prod(shape)
        if end + size > FILE_BYTES:
            write()
            header, end, number = {}, 0, number + 1
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end, total = end + size, total + size
    write()
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return total


def write_layout(path: Path, name: str) -> int:
    config, quantization, linear, _ = LAYOUTS[name]
    make_tokenizer(path)
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return write_headers(path, tensors_of(config, linear))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_published_layout_is_understood_by_its_headers(name: str, tmp_path: Path) -> None:
    num_bytes = write_layout(tmp_path / "model", name)
    config = decoder_config(tmp_path / "model")
    values = {"model.path": str(tmp_path / "model"), "engine.device": "cpu", "engine.kv_cache.num_blocks": "200"}
    settings = load_settings(values | {"engine.dtype": "bfloat16"}, environ={})
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        check_decoder(config, checkpoint)
        expected = expected_weights_bytes(checkpoint, config, settings.settings.engine)
    is_twice = choose_native(torch.device("cpu")).variant != "avx512_bf16"
    if config.tie_word_embeddings and is_twice:  # the head is laid out beside the embedding
        num_bytes += 2 * config.vocab_size * config.hidden_size
    assert abs(expected - num_bytes) < 0.02 * num_bytes  # GPTQ's g_idx, 1.5 % of the file, is not kept

    findings = {finding.check: finding for finding in model_findings(settings)}
    assert {finding.level for finding in findings.values()} == {Level.OK}, findings
    assert f"in {LAYOUTS[name][3]}, the rest {config.dtype}" in findings["model"].detail
    assert f"in {LAYOUTS[name][3]}, the rest bfloat16" in findings["fit"].detail
    assert "holds 3184 tokens" in findings["fit"].detail


def spoiled(change: Callable[[Tensors], Any]) -> Tensors:
    """Qwen3-4B's tensors, with a change."""
    config, _, linear, _ = LAYOUTS["RedHatAI/Qwen3-4B-quantized.w4a16"]
    tensors = tensors_of(config, linear)
    change(tensors)
    return tensors


O_PROJ = "model.layers.3.self_attn.o_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{O_PROJ}.weight_scale"), f"tensor {O_PROJ}.weight_scale is missing"),
        (
            lambda t: t.update({f"{O_PROJ}.weight_scale": ("BF16", (32, 2560))}),
            rf"{O_PROJ}.weight_scale has shape \[32, 2560\]; config.json asks for \[2560, 32\]",
        ),
        (
            lambda t: t.update({f"{O_PROJ}.weight_packed": ("F32", (2560, 512))}),
            f"{O_PROJ}.weight_packed has dtype F32; accepted: I32",
        ),
        (
            lambda t: t.update({f"{O_PROJ}.weight": ("BF16", (2560, 4096))}),
            f"the model has no place for tensor {O_PROJ}.weight",
        ),
        (
            lambda t: t.update({"model.norm.weight": ("I8", (2560,))}),
            "model.norm.weight has dtype I8; accepted: F32, BF16, F16",
        ),
    ],
)
def test_wrong_tensors_are_refused_by_name(change: Callable[[Tensors], Any], message: str, tmp_path: Path) -> None:
    write_layout(tmp_path / "model", "RedHatAI/Qwen3-4B-quantized.w4a16")
    for file in (tmp_path / "model").glob("*.safetensors"):
        file.unlink()
    write_headers(tmp_path / "model", spoiled(change))
    with Checkpoint.open(tmp_path / "model") as checkpoint, pytest.raises(CheckpointError, match=message):
        check_decoder(decoder_config(tmp_path / "model"), checkpoint)
