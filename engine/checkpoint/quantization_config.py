"""Reads how the weights of a checkpoint were rounded out of config.json's `quantization_config`, and refuses the rest.

GPTQ and AWQ files, FP8 files with a scale a block or a tensor, and compressed-tensors' groups. What comes out is data:
which modules are quantised, by which scheme, and in which layout their tensors lie.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

from engine.checkpoint.config_reader import ConfigReader
from engine.errors import CheckpointError
from kernels.quantised import Activations, WeightScheme

MXFP4 = "mxfp4"  # of experts alone, which `engine.models.biased_experts` reads
METHODS = ("awq", "compressed-tensors", "fp8", "gptq", MXFP4)
# gptq: qweight [K / 8, N], qzeros one too low in `gptq`; awq: qweight [K, N / 8], interleaved; packed: weight_packed
# [N, K / 8]; plain: weight [N, K] in 8 bits, its scales weight_scale or weight_scale_inv.
Layout = Literal["gptq", "gptq_v2", "awq", "packed", "plain", "mxfp4"]
FORMATS: dict[str, Layout] = {
    "pack-quantized": "packed",
    "int-quantized": "plain",
    "float-quantized": "plain",
    "naive-quantized": "plain",
}
GROUP_SIZES = "a whole number, at least 1, or -1"
Has = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class StoredScheme:
    """How a module's weight was rounded and in which tensors it lies."""

    scheme: WeightScheme
    layout: Layout
    # The group of each input is what a tensor of the file says, g_idx or weight_g_idx: without it there is no reading.
    needs_groups: bool = False


@dataclass(frozen=True, slots=True)
class SchemeGroup:
    """Modules that share a scheme, as compressed-tensors has them."""

    name: str
    targets: tuple[str, ...]  # names of modules, `re:` patterns of them, or Linear for all
    stored: StoredScheme


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """Which modules are quantised, and how."""

    method: str
    groups: tuple[SchemeGroup, ...]
    # Names of modules, `re:` patterns of them: not quantised. Beside by_tensors parts of names too, whole between dots:
    # `mlp.gate`, `self_attn`.
    ignore: tuple[str, ...]
    # Whether a module without the tensors of a quantised one is not quantised: GPTQ, AWQ and FP8 files name neither
    # their routers nor their heads, which are left as they were.
    by_tensors: bool
    has_kv_scales: bool = False  # scales of an 8-bit KV cache, which engine.kv_cache.dtype=fp8 alone reads
    is_head_quantised: bool | None = None  # as a GPTQ file says; None: its tensors alone do

    @classmethod
    def from_reader(cls, config: ConfigReader) -> QuantizationConfig | None:
        """Read `quantization_config`; None where there is none. Raises CheckpointError naming the key."""
        table = config.table("quantization_config")
        if table is None:
            return None
        method = table.choice("quant_method", METHODS)
        if method == "compressed-tensors":
            return _compressed_tensors(table)
        if method == MXFP4:
            stored = StoredScheme(WeightScheme(8, is_float=False, group_size=32), "mxfp4")
            return cls(method, (SchemeGroup("experts", (), stored),), (), by_tensors=True)
        read = {"gptq": _gptq, "awq": _awq, "fp8": _fp8}[method]
        groups = (SchemeGroup("all", ("Linear",), read(table)),)
        if method != "gptq":
            has_kv_scales = method == "fp8" and table.has("kv_cache_scheme")
            return cls(method, groups, _left_out(table), by_tensors=True, has_kv_scales=has_kv_scales)
        is_head_quantised = table.flag("lm_head") if table.has("lm_head") else None
        return cls(method, groups, _rules(table), by_tensors=True, is_head_quantised=is_head_quantised)

    def scheme_of(self, module: str, has: Has) -> StoredScheme | None:
        """How a linear layer is stored, by its name without `.weight`; None: unquantised.

        has: whether the checkpoint has a tensor of this name. Raises CheckpointError where by_tensors a module is
        quantised that config.json leaves out.
        """
        if self.by_tensors:
            return self._by_tensors(module, has)
        if any(_matches(module, pattern) for pattern in self.ignore):
            return None
        # The most specific first: a name, then patterns, then all linear layers.
        for rank in (_is_name, _is_pattern, _is_class):
            for group in self.groups:
                if any(rank(target) and _matches(module, target) for target in group.targets):
                    return group.stored
        return None

    def _by_tensors(self, module: str, has: Has) -> StoredScheme | None:
        # The last is of all experts in one, whose module has a tensor's name: mlp.experts.gate_up_proj.
        marks = (".qweight", ".weight_scale_inv", ".weight_scale", "_scale_inv")
        found = next((mark for mark in marks if has(f"{module}{mark}")), None)
        if module == "lm_head" and self.is_head_quantised not in (None, found is not None):
            tensors = "quantised" if found else "not quantised"
            raise CheckpointError(
                f"config.json: quantization_config: lm_head is {self.is_head_quantised}, but its tensors are "
                f"{tensors}; accepted: what the tensors are, or no such key"
            )
        if found is None:
            return None
        for entry in self.ignore:
            if _matches(module, entry) if _is_pattern(entry) else f".{entry}." in f".{module}.":
                raise CheckpointError(
                    f"tensor {module}{found} is there, but quantization_config leaves out {entry!r}; accepted: one of "
                    "the two, a module that is quantised or one that is left out"
                )
        return self.groups[0].stored

    def __str__(self) -> str:
        schemes = dict.fromkeys(str(group.stored.scheme) for group in self.groups)
        scales = ", scales of an 8-bit KV cache" if self.has_kv_scales else ""
        return f"{self.method}: {'; '.join(schemes)}{scales}"


def _is_pattern(target: str) -> bool:
    return target.startswith("re:")


def _is_class(target: str) -> bool:
    return target == "Linear"


def _is_name(target: str) -> bool:
    return not _is_pattern(target) and not _is_class(target)


def _matches(module: str, target: str) -> bool:
    if _is_pattern(target):
        return re.match(target.removeprefix("re:"), module) is not None
    return _is_class(target) or target == module


def _refuse_keys(table: ConfigReader, accepted: dict[str, str]) -> None:
    """Refuse keys (key -> what is accepted) that ask for something: neither null, false nor empty."""
    for key, wanted in accepted.items():
        if table.data.get(key):
            raise table.refuse(key, table.data[key], wanted)


def _bits(table: ConfigReader, key: str, accepted: tuple[int, ...] = (4, 8)) -> Literal[4, 8]:
    value = table.integer(key)
    if value not in accepted:
        raise table.refuse(key, value, " or ".join(map(str, accepted)))
    return cast("Literal[4, 8]", value)


def _group_size(table: ConfigReader) -> int | None:
    """None: one group for all inputs of a row."""
    value = table.data.get("group_size", 128)
    if not isinstance(value, int) or isinstance(value, bool) or (value < 1 and value != -1):
        raise table.refuse("group_size", value, GROUP_SIZES)
    return None if value == -1 else value


def _gptq(table: ConfigReader) -> StoredScheme:
    """Keys of AutoGPTQ and GPTQModel. Whether inputs are reordered (`desc_act`) is what each g_idx says."""
    _refuse_keys(table, {"is_marlin_format": "false: the layout of gptq"})
    table.choice("pack_dtype", ("int32",), default="int32")
    is_reordered = table.flag("desc_act", default=False)
    layout = table.choice(table.first_of("format", "checkpoint_format"), ("gptq", "gptq_v2"), default="gptq")
    scheme = WeightScheme(
        bits=_bits(table, "bits"),
        is_float=False,
        group_size=_group_size(table),
        symmetric=table.flag("sym", default=True),
    )
    return StoredScheme(scheme, cast("Layout", layout), is_reordered and scheme.group_size is not None)


def _rules(table: ConfigReader) -> tuple[str, ...]:
    """Of `dynamic` those that leave modules out, as `re:` patterns; the others give modules schemes of their own."""
    rules = table.table("dynamic")
    for rule in () if rules is None else rules.data:
        if not rule.startswith("-:"):
            raise table.refuse("dynamic", rule, "rules that leave modules unquantised, which begin with -:")
        _check_expression(table, "dynamic", rule, rule.removeprefix("-:"))
    return () if rules is None else tuple(f"re:{rule.removeprefix('-:')}" for rule in rules.data)


def _left_out(table: ConfigReader) -> tuple[str, ...]:
    """Modules that are not quantised. `ignored_layers` is AutoFP8's name for them."""
    keys = ("modules_to_not_convert", "ignored_layers")
    return tuple(entry.strip(".") for key in keys for entry in _strings(table, key))


def _awq(table: ConfigReader) -> StoredScheme:
    """Keys of AutoAWQ. A file that names no version is of the first one, gemm, as its readers have it."""
    version = table.data.get(table.first_of("version", "format")) or "gemm"
    if not isinstance(version, str) or version.lower() != "gemm":
        raise table.refuse("version", version, "gemm")
    if not table.flag("zero_point", default=True):
        raise table.refuse("zero_point", False, "true")
    bits = _bits(table, "bits", (4,))
    scheme = WeightScheme(bits=bits, is_float=False, group_size=_group_size(table), symmetric=False)
    return StoredScheme(scheme, "awq")


def _fp8(table: ConfigReader) -> StoredScheme:
    """Keys of DeepSeek's and Qwen's files, and of AutoFP8's."""
    table.choice("fmt", ("e4m3",), default="e4m3")
    table.choice("scale_fmt", ("float",), default="float")
    table.choice("expert_dtype", ("fp8",), default="fp8")
    is_static = table.choice("activation_scheme", ("dynamic", "static"), default="dynamic") == "static"
    table.choice("kv_cache_scheme", ("static",), default="static")  # AutoFP8's scales of a cache
    _refuse_keys(table, {"modules_to_convert": "null: embeddings are not quantised"})
    block = table.integers("weight_block_size", minimum=1)
    if block and (len(block) != 2 or is_static):
        raise table.refuse("weight_block_size", block, "two whole numbers beside activation_scheme dynamic, or null")
    activations: Activations = "float8_tensor" if is_static else "float8_group" if block else "float8_token"
    rows, inputs = block or (None, None)
    return StoredScheme(WeightScheme(8, True, inputs, rows, activations=activations), "plain")


def _compressed_tensors(table: ConfigReader) -> QuantizationConfig:
    sparsity = table.table("sparsity_config")
    if sparsity is not None and sparsity.data.get("format", "dense") != "dense":
        raise sparsity.refuse("format", sparsity.data.get("format"), "dense")
    table.table("kv_cache_scheme")  # whatever it says: the setting decides, and a scale is one of e4m3 too
    _refuse_keys(table, {"transform_config": "null: rotations of activations are not computed"})
    groups = table.table("config_groups")
    if groups is None or not groups.data:
        raise table.refuse("config_groups", table.data.get("config_groups"), "an object of groups")
    read = []
    for name in groups.data:
        group = groups.table(name)
        if group is None:
            raise groups.refuse(name, None, "an object with targets and weights")
        read.append(_scheme_group(name, group, table))
    ignore = _strings(table, "ignore")
    has_kv_scales = table.has("kv_cache_scheme")
    return QuantizationConfig("compressed-tensors", tuple(read), ignore, by_tensors=False, has_kv_scales=has_kv_scales)


def _strings(table: ConfigReader, key: str) -> tuple[str, ...]:
    value = table.data.get(key) or []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise table.refuse(key, value, "a list of names of modules, or patterns that begin with re:")
    for item in filter(_is_pattern, value):
        _check_expression(table, key, item, item.removeprefix("re:"))
    return tuple(value)


def _check_expression(table: ConfigReader, key: str, value: str, expression: str) -> None:
    try:
        re.compile(expression)
    except re.error as error:
        raise table.refuse(key, value, f"a regular expression ({error})") from error


def _scheme_group(name: str, group: ConfigReader, table: ConfigReader) -> SchemeGroup:
    targets = _strings(group, "targets")
    for target in targets:
        if _is_name(target) and "." not in target and target != "lm_head":
            raise group.refuse("targets", target, "Linear, names of modules, and patterns that begin with re:")
    _refuse_keys(group, {"output_activations": "null"})
    source = group if group.has("format") else table
    weights = group.table("weights")
    if weights is None:
        raise group.refuse("weights", None, "an object")
    layout = FORMATS[source.choice("format", tuple(FORMATS))]
    scheme = _weights_scheme(weights, group.table("input_activations"))
    if layout == "packed" and scheme.is_float:
        raise source.refuse("format", source.data["format"], "float-quantized beside weights of type float")
    if layout == "plain" and scheme.bits == 4:
        raise source.refuse("format", source.data["format"], "pack-quantized beside weights of 4 bits")
    needs_groups = layout == "packed" and _is_reordered(weights)
    return SchemeGroup(name, targets, StoredScheme(scheme, layout, needs_groups))


def _is_reordered(weights: ConfigReader) -> bool:
    """Whether each input has a group of its own choice, and not only was rounded in another order."""
    order = weights.data.get("actorder") or "weight"
    accepted = {"group": True, "dynamic": True, True: True, "weight": False, "static": False}
    if not isinstance(order, str | bool) or order not in accepted:
        raise weights.refuse("actorder", order, "group, dynamic, true, weight, static, false, null")
    return accepted[order]


def _weights_scheme(weights: ConfigReader, inputs: ConfigReader | None) -> WeightScheme:
    is_float = weights.choice("type", ("int", "float"), default="int") == "float"
    bits = _bits(weights, "num_bits", (8,) if is_float else (4, 8))
    symmetric = weights.flag("symmetric", default=True)
    if weights.data.get("dynamic"):
        raise weights.refuse("dynamic", weights.data["dynamic"], "false")
    if is_float and not symmetric:
        raise weights.refuse("symmetric", False, "true beside type float")
    strategy = weights.choice("strategy", ("tensor", "channel", "group", "block"), default=_strategy(weights))
    rows, group = 1, None
    block: list[int] = []
    if strategy == "group":
        group = weights.integer("group_size")
    elif weights.data.get("group_size") not in (None, -1):
        raise weights.refuse("group_size", weights.data["group_size"], f"null beside strategy {strategy}")
    elif strategy == "block":
        block = weights.integers("block_structure", minimum=1)
        if len(block) != 2 or not is_float:
            raise weights.refuse("block_structure", block, "two whole numbers, beside type float")
        rows, group = block
    activations = _activations(inputs)
    is_channelwise = strategy in ("tensor", "channel")
    if activations == "int8_token" and not (bits == 8 and not is_float and symmetric and is_channelwise):
        raise weights.refuse(
            "num_bits", bits, "8, symmetric, a scale a channel or tensor, beside input_activations of integers"
        )
    if activations.startswith("float8") and not is_float:
        raise weights.refuse("type", "int", "float beside input_activations of type float")
    block_rows = None if strategy == "tensor" else rows
    return WeightScheme(bits, is_float, group, block_rows, symmetric, activations)


def _strategy(weights: ConfigReader) -> str:
    """What compressed-tensors takes a group for that names no strategy: its group_size says."""
    size = weights.data.get("group_size")
    return "tensor" if size is None else "channel" if size == -1 else "group"


def _activations(inputs: ConfigReader | None) -> Activations:
    """What becomes of activations before a product."""
    if inputs is None:
        return "none"
    if inputs.integer("num_bits", default=8) != 8:
        raise inputs.refuse("num_bits", inputs.data["num_bits"], "8")
    if not inputs.flag("symmetric", default=True):
        raise inputs.refuse("symmetric", False, "true")
    is_float = inputs.choice("type", ("int", "float"), default="int") == "float"
    is_dynamic = inputs.data.get("dynamic", False)
    if not isinstance(is_dynamic, bool):
        raise inputs.refuse("dynamic", is_dynamic, "true or false")
    if not is_float:
        strategy = inputs.choice("strategy", ("token",), default="token")
        if not is_dynamic:
            raise inputs.refuse("dynamic", is_dynamic, f"true beside type int and strategy {strategy}")
        return "int8_token"
    accepted = ("token", "tensor", "group") if is_dynamic else ("tensor",)
    strategy = inputs.choice("strategy", accepted, default="token" if is_dynamic else "tensor")
    if not is_dynamic:
        return "float8_tensor"
    return "float8_group" if strategy == "group" else "float8_token"
