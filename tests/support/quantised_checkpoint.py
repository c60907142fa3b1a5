"""Writes a checkpoint in each published quantised layout, element by element, and the same weights dequantised.

Written from the formats' own descriptions, and shares no code with the loader: `tests/models/test_quantised_formats.py`
holds what it writes to the formats' own readers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Array = np.ndarray[Any, Any]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of 8 neighbouring outputs each nibble of a word holds, lowest first


def _is_linear(module: str) -> bool:
    return module.endswith(("_proj", ".w1", ".w2", ".w3"))


@dataclass(frozen=True)
class Method:
    """One way of quantising: what to write, and what config.json says of it."""

    kind: str  # gptq, awq, packed, plain
    config: dict[str, Any]
    bits: int = 4
    group: int | None = None
    symmetric: bool = True
    order: bool = False  # inputs in random order, as act-order leaves them
    is_float: bool = False
    block_rows: int = 1  # 0: the whole tensor
    scale_name: str = "weight_scale"
    input_scale: bool = False
    is_quantised: Callable[[str], bool] = _is_linear


def _compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, kind: str, ignore: list[str]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


_IGNORE = ["lm_head", "re:.*(mlp|block_sparse_moe)\\.gate$", "model.layers.0.self_attn.o_proj"]
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}
_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
_FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
_TOKEN = {"num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}


def _is_compressed(module: str) -> bool:
    return _is_linear(module) and module != "model.layers.0.self_attn.o_proj"


METHODS = {
    "gptq": Method("gptq", {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True}, group=16),
    "gptq_order": Method(
        "gptq",
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, "desc_act": True},
        group=16,
        symmetric=False,
        order=True,
    ),
    "gptq_8bit": Method("gptq", {"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": True}, bits=8, group=32),
    "gptq_v2_8bit": Method(
        "gptq",
        {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": False, "checkpoint_format": "gptq_v2"},
        bits=8,
        symmetric=False,
    ),
    "awq": Method(
        "awq",
        {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True},
        group=16,
        symmetric=False,
    ),
    "w4a16": Method(
        "packed", _compressed(_INT4, None, "pack-quantized", _IGNORE), group=32, is_quantised=_is_compressed
    ),
    "w4a16_zeros": Method(
        "packed",
        _compressed(
            _INT4 | {"group_size": 16, "symmetric": False, "actorder": "group"}, None, "pack-quantized", _IGNORE
        ),
        group=16,
        symmetric=False,
        order=True,
        is_quantised=_is_compressed,
    ),
    "int8": Method("plain", _compressed(_INT8, None, "int-quantized", _IGNORE), bits=8, is_quantised=_is_compressed),
    "w8a8": Method(
        "plain",
        _compressed(_INT8, _TOKEN | {"type": "int"}, "int-quantized", _IGNORE),
        bits=8,
        is_quantised=_is_compressed,
    ),
    "fp8_dynamic": Method(
        "plain",
        _compressed(_FP8, _TOKEN | {"type": "float"}, "float-quantized", _IGNORE),
        bits=8,
        is_float=True,
        is_quantised=_is_compressed,
    ),
    "fp8_static": Method(
        "plain",
        {"quant_method": "fp8", "activation_scheme": "static"},
        bits=8,
        is_float=True,
        block_rows=0,
        input_scale=True,
    ),
    "fp8_blocks": Method(
        "plain",
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [24, 16], "fmt": "e4m3"},
        bits=8,
        group=16,
        is_float=True,
        block_rows=24,
        scale_name="weight_scale_inv",
    ),
}
# One that quantises the head too.
METHODS["w4a16_head"] = replace(
    METHODS["w4a16"],
    config=_compressed(_INT4, None, "pack-quantized", _IGNORE[1:]),
    is_quantised=lambda module: _is_compressed(module) or module == "lm_head",
)


@dataclass(frozen=True)
class Rounded:
    """A matrix [N, K] as codes, and what they mean; the group of each input is `groups[k]`."""

    codes: Array  # [N, K] unsigned, or float8 values
    scales: Array  # [R, G] float32
    zeros: Array  # [R, G]
    groups: Array  # [K]
    block_rows: int

    def dequantised(self) -> Array:
        rows = np.arange(self.codes.shape[0]) // (self.block_rows or self.codes.shape[0])
        result: Array = (self.codes - self.zeros[rows][:, self.groups]) * self.scales[rows][:, self.groups]
        return result


def round_matrix(weight: Array, method: Method, seed: int) -> Rounded:
    """Round to the nearest; scales are numbers of float16, so that files may hold them as such."""
    num_rows, width = weight.shape
    group = method.group or width
    groups = np.arange(width) // group
    if method.order:
        groups = groups[np.random.default_rng(seed).permutation(width)]
    block = method.block_rows or num_rows
    grid = (-(-num_rows // block), -(-width // group))
    scales, zeros = np.ones(grid, np.float32), np.zeros(grid, np.float32)
    codes = np.zeros_like(weight)
    top = 2**method.bits - 1
    for row, column in np.ndindex(grid):
        rows, inputs = slice(row * block, (row + 1) * block), groups == column
        part = weight[rows, inputs]
        largest, zero = np.abs(part).max(), 0.0
        scale = np.float32(np.float16(largest / (448 if method.is_float else top / 2 - 0.5)))
        if not method.symmetric:
            low, high = min(part.min(), 0), max(part.max(), 0)
            scale = np.float32(np.float16((high - low) / top))
            zero = np.clip(np.round(-low / scale), 0, top)
        elif not method.is_float:
            zero = (top + 1) / 2
        scales[row, column], zeros[row, column] = scale, zero
        if method.is_float:
            codes[rows, inputs] = torch.tensor(part / scale).to(torch.float8_e4m3fn).float().numpy()
        else:
            codes[rows, inputs] = np.clip(np.round(part / scale) + zero, 0, top)
    return Rounded(codes, scales, zeros, groups, method.block_rows)


def pack_words(codes: Array, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[n, m] -> [n, m * bits / 32] int32, the first in the lowest bits, or those that `order` names."""
    per_word = 32 // bits
    words = np.zeros((codes.shape[0], -(-codes.shape[1] // per_word)), np.uint32)
    for column in range(words.shape[1]):
        for place in range(per_word):
            source = column * per_word + (place if order is None else order[place])
            if source < codes.shape[1]:
                words[:, column] |= codes[:, source].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32).copy())


def stored_tensors(module: str, rounded: Rounded, method: Method) -> dict[str, torch.Tensor]:
    """The tensors of one layer, by their names."""
    bits, scales = method.bits, torch.from_numpy(rounded.scales)
    if method.kind in ("gptq", "awq"):
        half = scales.half().t().contiguous()
        if method.kind == "awq":
            words = pack_words(rounded.codes.T, 4, AWQ_ORDER)
            return {
                f"{module}.qweight": words,
                f"{module}.qzeros": pack_words(rounded.zeros.T, 4, AWQ_ORDER),
                f"{module}.scales": half,
            }
        zeros = pack_words(rounded.zeros.T, bits)
        if method.config.get("checkpoint_format") != "gptq_v2":  # one lower, in arithmetic of 32 bits
            ones = 0x11111111 if bits == 4 else 0x01010101
            zeros = torch.from_numpy((zeros.numpy().view(np.uint32) - np.uint32(ones)).view(np.int32))
        return {
            f"{module}.qweight": pack_words(rounded.codes, bits).t().contiguous(),
            f"{module}.qzeros": zeros,
            f"{module}.scales": half,
            f"{module}.g_idx": torch.from_numpy(rounded.groups.astype(np.int32)),
        }
    if method.kind == "packed":
        tensors = {
            f"{module}.weight_packed": pack_words(rounded.codes, bits),
            f"{module}.weight_scale": scales,
            f"{module}.weight_shape": torch.tensor(rounded.codes.shape, dtype=torch.int64),
        }
        if not method.symmetric:
            tensors[f"{module}.weight_zero_point"] = pack_words(rounded.zeros.T, bits).t().contiguous()
        if method.order:
            tensors[f"{module}.weight_g_idx"] = torch.from_numpy(rounded.groups.astype(np.int32))
        return tensors
    stored = rounded.codes if method.is_float else rounded.codes - rounded.zeros
    dtype = torch.float8_e4m3fn if method.is_float else torch.int8
    tensors = {f"{module}.weight": torch.from_numpy(stored).to(dtype)}
    tensors[f"{module}.{method.scale_name}"] = scales.reshape(1) if method.block_rows == 0 else scales
    if method.input_scale:
        tensors[f"{module}.input_scale"] = torch.tensor([0.5])
    return tensors


def quantise_checkpoint(plain: Path, directory: Path, method: Method, *, num_files: int = 1) -> tuple[Path, Path]:
    """Write the checkpoint `plain` quantised, and dequantised again in float32: two new directories under `directory`.

    num_files: over how many the quantised tensors are spread, with an index.
    """
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(plain.glob("*.safetensors")):
        tensors |= load_file(file)
    quantised, dense = dict(tensors), dict(tensors)
    for name in sorted(tensors):
        module = name.removesuffix(".weight")
        if method.is_quantised(module):
            # One order for what is multiplied together, as calibration on one input leaves it.
            seed = sum(map(ord, module.rpartition(".")[0])) + (module.endswith(("down_proj", "o_proj", ".w2")))
            rounded = round_matrix(tensors[name].float().numpy(), method, seed)
            del quantised[name]
            quantised |= stored_tensors(module, rounded, method)
            dense[name] = torch.from_numpy(rounded.dequantised().astype(np.float32))
    config = json.loads((plain / "config.json").read_text())
    result = []
    for name, content, extra in (
        ("quantised", quantised, {"quantization_config": method.config}),
        ("dense", dense, {}),
    ):
        path = directory / name
        shutil.copytree(plain, path, ignore=shutil.ignore_patterns("*.safetensors*"))
        (path / "config.json").write_text(json.dumps(config | extra))
        save_files(path, content, num_files if name == "quantised" else 1)
        result.append(path)
    return result[0], result[1]


def save_files(path: Path, tensors: dict[str, torch.Tensor], num_files: int) -> None:
    """Write weights into one file, or into several in no order of names, with an index."""
    if num_files == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    names = [f"model-{index + 1:05}-of-{num_files:05}.safetensors" for index in range(num_files)]
    places = {name: names[(7 * index) % num_files] for index, name in enumerate(tensors)}
    for file in names:
        part = {name: tensor for name, tensor in tensors.items() if places[name] == file}
        save_file(part, path / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
