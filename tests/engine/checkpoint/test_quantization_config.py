"""What quantization_config is read as, and what is refused by its key."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from compressed_tensors.quantization import QuantizationArgs

from engine.checkpoint.config_reader import ConfigReader
from engine.checkpoint.quantization_config import QuantizationConfig
from engine.errors import CheckpointError

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
INT8 = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
Q_PROJ = "model.layers.0.self_attn.q_proj"


def compressed(
    weights: dict[str, Any] | None = None, group: dict[str, Any] | None = None, **table: Any
) -> dict[str, Any]:
    described = {"targets": ["Linear"], "weights": WEIGHTS | (weights or {})} | (group or {})
    whole = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": described}}
    return whole | table


def read(table: dict[str, Any]) -> QuantizationConfig:
    config = QuantizationConfig.from_reader(ConfigReader({"quantization_config": deepcopy(table)}, "config.json"))
    assert config is not None
    return config


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (GPTQ | {"bits": 3}, "bits is 3; accepted: 4 or 8"),
        (GPTQ | {"group_size": 0}, "group_size is 0; accepted: a whole number, at least 1, or -1"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; accepted: gptq, gptq_v2"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format is True; accepted: false"),
        (GPTQ | {"pack_dtype": "int8"}, "pack_dtype is 'int8'; accepted: int32"),
        (GPTQ | {"sym": "yes"}, "sym is 'yes'; accepted: true or false"),
        (GPTQ | {"dynamic": {"+:.*up_proj": {"bits": 8}}}, r"dynamic is '\+:.*up_proj'; accepted: rules that leave"),
        (GPTQ | {"dynamic": {"-:(": {}}}, r"dynamic is '-:\('; accepted: a regular expression"),
        (AWQ | {"bits": 8}, "bits is 8; accepted: 4"),
        (AWQ | {"version": "gemv"}, "version is 'gemv'; accepted: gemm"),
        (AWQ | {"zero_point": False}, "zero_point is False; accepted: true"),
        (AWQ | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head'; accepted: a list"),
        (FP8 | {"fmt": "e5m2"}, "fmt is 'e5m2'; accepted: e4m3"),
        (FP8 | {"scale_fmt": "ue8m0"}, "scale_fmt is 'ue8m0'; accepted: float"),
        (FP8 | {"activation_scheme": "static"}, r"weight_block_size is \[128, 128\]; accepted: two whole numbers"),
        (FP8 | {"weight_block_size": [128]}, r"weight_block_size is \[128\]; accepted: two whole numbers"),
        (FP8 | {"ignored_layers": [1]}, r"ignored_layers is \[1\]; accepted: a list of names"),
        (compressed(config_groups={}), r"config_groups is \{\}; accepted: an object of groups"),
        (compressed(format="nvfp4-pack-quantized"), "format is 'nvfp4-pack-quantized'; accepted: pack-quantized"),
        (compressed(format="int-quantized"), "format is 'int-quantized'; accepted: pack-quantized beside weights of 4"),
        (compressed(kv_cache_scheme="fp8"), "kv_cache_scheme is 'fp8'; accepted: an object or null"),
        (FP8 | {"kv_cache_scheme": "dynamic"}, "kv_cache_scheme is 'dynamic'; accepted: static"),
        (GPTQ | {"lm_head": "yes"}, "lm_head is 'yes'; accepted: true or false"),
        (compressed({"strategy": "channel"}), "group_size is 128; accepted: null beside strategy channel"),
        (compressed(transform_config={"r": 1}), "transform_config is .*; accepted: null"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "format is 'sparse-24-bitmask'; accepted: dense"),
        (compressed(ignore=["re:("]), r"ignore is 're:\('; accepted: a regular expression"),
        (compressed(group={"targets": ["Embedding"]}), r"targets is 'Embedding'; accepted: Linear, names"),
        (compressed({"symmetric": False, "type": "float", "num_bits": 8}), "symmetric is False; accepted: true beside"),
        (compressed({"actorder": "rows"}), "actorder is 'rows'; accepted: group, dynamic, true, weight"),
        (compressed(group={"input_activations": INT8}), "num_bits is 4; accepted: 8, symmetric, a scale a channel"),
        (compressed(group={"input_activations": INT8 | {"symmetric": False}}), "symmetric is False; accepted: true"),
        (compressed(group={"input_activations": INT8 | {"dynamic": False}}), "dynamic is False; accepted: true"),
        (compressed(group={"output_activations": INT8}), "output_activations is .*; accepted: null"),
    ],
)
def test_what_is_not_computed_is_refused_by_key(table: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^config.json: quantization_config.*: {message}"):
        read(table)


@pytest.mark.parametrize(
    ("table", "entry"),
    [
        (AWQ | {"modules_to_not_convert": ["lm_head", "self_attn"]}, "'self_attn'"),
        (FP8 | {"modules_to_not_convert": [Q_PROJ]}, f"'{Q_PROJ}'"),
        (FP8 | {"ignored_layers": ["model.layers.0."]}, "'model.layers.0'"),
        (GPTQ | {"dynamic": {"-:.*self_attn": {}}}, r"'re:.\*self_attn'"),
    ],
)
def test_a_module_that_is_left_out_may_not_be_quantised(table: dict[str, Any], entry: str) -> None:
    config = read(table)
    assert config.scheme_of(Q_PROJ, lambda name: False) is None
    mark = "weight_scale_inv" if table["quant_method"] == "fp8" else "qweight"
    message = f"tensor {Q_PROJ}.{mark} is there, but quantization_config leaves out {entry}; accepted: one of the two"
    with pytest.raises(CheckpointError, match=message):
        config.scheme_of(Q_PROJ, lambda name: name == f"{Q_PROJ}.{mark}")


def test_a_name_leaves_out_no_module_that_only_begins_like_it() -> None:
    config = read(AWQ | {"modules_to_not_convert": ["mlp.gate", "q_pro", "model.layers.1"]})
    for module in (Q_PROJ, "model.layers.0.mlp.gate_proj", "model.layers.11.mlp.up_proj"):
        assert config.scheme_of(module, lambda name: True) is not None


def test_the_most_specific_group_of_a_module_is_its_own() -> None:
    groups = {
        "all": {"targets": ["Linear"], "weights": WEIGHTS},
        "patterns": {"targets": ["re:.*self_attn.*"], "weights": WEIGHTS | {"group_size": 64}},
        "names": {"targets": [Q_PROJ], "weights": WEIGHTS | {"group_size": 32}},
    }
    config = read(compressed(config_groups=groups, ignore=["lm_head", "re:.*o_proj$"]))
    sizes = {}
    for module in ("lm_head", "model.layers.0.mlp.up_proj", Q_PROJ, Q_PROJ.replace("q_", "k_"), "a.o_proj"):
        stored = config.scheme_of(module, lambda name: True)
        sizes[module] = None if stored is None else stored.scheme.group_size
    assert list(sizes.values()) == [None, 128, 32, 64, None]


@pytest.mark.parametrize(
    ("weights", "strategy", "shown"),
    [
        ({"num_bits": 4, "group_size": 64}, "group", "int4, groups of 64"),
        ({"num_bits": 4, "group_size": -1}, "channel", "int4, one scale a channel"),
        ({"num_bits": 4}, "tensor", "int4, one scale a tensor"),
    ],
)
def test_a_group_without_a_strategy_follows_from_its_group_size(
    weights: dict[str, Any], strategy: str, shown: str
) -> None:
    """As compressed-tensors reads it."""
    config = read(compressed(config_groups={"a": {"targets": ["Linear"], "weights": weights}}))
    assert str(config) == f"compressed-tensors: {shown}"
    assert QuantizationArgs(**weights).strategy == strategy


@pytest.mark.parametrize("named", [{}, {"version": None}, {"version": "GEMM"}, {"format": "gemm"}])
def test_an_awq_file_of_no_version_is_of_the_first(named: dict[str, Any]) -> None:
    stored = read(AWQ | named).scheme_of(Q_PROJ, lambda name: True)
    assert stored is not None
    assert stored.layout == "awq"


def test_whether_gptqs_head_is_quantised_is_what_both_say() -> None:
    quantised, plain = (lambda name: name == "lm_head.qweight"), (lambda name: name == "lm_head.weight")
    for said in ({}, {"lm_head": None}, {"lm_head": True}):
        assert read(GPTQ | said).scheme_of("lm_head", quantised) is not None
    for said in ({}, {"lm_head": None}, {"lm_head": False}):
        assert read(GPTQ | said).scheme_of("lm_head", plain) is None
    with pytest.raises(CheckpointError, match="lm_head is False, but its tensors are quantised; accepted"):
        read(GPTQ | {"lm_head": False}).scheme_of("lm_head", quantised)
    with pytest.raises(CheckpointError, match="lm_head is True, but its tensors are not quantised; accept"):
        read(GPTQ | {"lm_head": True}).scheme_of("lm_head", plain)
    assert read(GPTQ | {"lm_head": False}).scheme_of(Q_PROJ, lambda name: True) is not None


@pytest.mark.parametrize(
    "table",
    [
        compressed(kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}),
        FP8 | {"kv_cache_scheme": "static"},
    ],
)
def test_scales_of_a_kv_cache_are_mentioned(table: dict[str, Any]) -> None:
    assert str(read(table)).endswith(", scales of an 8-bit KV cache")
    assert "KV cache" not in str(read(table | {"kv_cache_scheme": None}))
