"""What tests/support writes in each layout is what the formats' own readers make of it."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationScheme

from tests.support.quantised_checkpoint import METHODS, Method, Rounded, round_matrix, stored_tensors

ROWS, WIDTH = 48, 64


def written(name: str) -> tuple[Method, Rounded, dict[str, torch.Tensor]]:
    weight = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    rounded = round_matrix(weight, METHODS[name], seed=1)
    tensors = stored_tensors("layer", rounded, METHODS[name])
    return METHODS[name], rounded, {key.removeprefix("layer."): tensor for key, tensor in tensors.items()}


@pytest.mark.parametrize("name", ["gptq", "gptq_order", "gptq_8bit", "gptq_v2_8bit"])
def test_gptq_is_what_its_kernels_read(name: str) -> None:
    """As AutoGPTQ's and GPTQModel's PyTorch kernels unpack: inputs along the words of qweight, outputs of qzeros."""
    method, rounded, tensors = written(name)
    shifts = torch.arange(0, 32, method.bits, dtype=torch.int32)
    top = 2**method.bits - 1
    qzeros = tensors["qzeros"]
    if name != "gptq_v2_8bit":
        qzeros = qzeros + (0x11111111 if method.bits == 4 else 0x01010101)
    zeros = (qzeros.unsqueeze(2) >> shifts & top).reshape(qzeros.shape[0], -1)
    codes = (tensors["qweight"].unsqueeze(1) >> shifts.view(1, -1, 1) & top).reshape(WIDTH, ROWS)
    groups = tensors["g_idx"].long()
    weight = tensors["scales"].float()[groups] * (codes - zeros[groups]).float()
    torch.testing.assert_close(weight.t(), torch.from_numpy(rounded.dequantised()), atol=0, rtol=0)


def test_awq_is_what_its_kernels_read() -> None:
    """As AutoAWQ unpacks: columns by rising shifts, then each 8 of them in the reverse of its order."""
    method, rounded, tensors = written("awq")
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    order = torch.arange(ROWS).view(-1, 8)[:, [0, 4, 1, 5, 2, 6, 3, 7]].view(-1)
    codes, zeros = (
        (tensors[name][:, :, None] >> shifts).view(tensors[name].shape[0], -1)[:, order] & 15
        for name in ("qweight", "qzeros")
    )
    assert method.group is not None
    scales = tensors["scales"].float().repeat_interleave(method.group, 0)
    weight = (codes - zeros.repeat_interleave(method.group, 0)) * scales
    torch.testing.assert_close(weight.t(), torch.from_numpy(rounded.dequantised()), atol=0, rtol=0)


@pytest.mark.parametrize("name", ["w4a16", "int8", "w8a8", "fp8_dynamic"])
def test_compressed_tensors_reads_it(name: str) -> None:
    method, rounded, tensors = written(name)
    group: dict[str, Any] = dict(method.config["config_groups"]["group_0"])
    scheme = QuantizationScheme(**group)
    reader = BaseCompressor.load_from_registry(method.config["format"])
    weight = reader.decompress(dict(tensors), scheme)["weight"]
    torch.testing.assert_close(weight.float(), torch.from_numpy(rounded.dequantised()), atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("name", ["w4a16", "w4a16_zeros", "int8", "w8a8", "fp8_dynamic"])
def test_compressed_tensors_writes_the_same_tensors(name: str) -> None:
    """So tests of the files written here are tests of its own."""
    method = replace(METHODS[name], order=False)  # its writer knows no order of inputs
    rounded = round_matrix(np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32), method, seed=1)
    state = {
        "weight": torch.from_numpy(rounded.dequantised()),
        "weight_scale": torch.from_numpy(rounded.scales),
        "weight_zero_point": torch.from_numpy(rounded.zeros - 2 ** (method.bits - 1)).to(torch.int8),
    }
    if method.symmetric:
        del state["weight_zero_point"]
    group: dict[str, Any] = deepcopy(method.config["config_groups"]["group_0"])
    group["weights"].pop("actorder", None)
    writer = BaseCompressor.load_from_registry(method.config["format"])

    theirs = writer.compress(state, QuantizationScheme(**group))

    ours = stored_tensors("layer", rounded, method)
    assert {f"layer.{key}" for key in theirs} == ours.keys()
    for key, tensor in theirs.items():
        assert tensor.dtype == ours[f"layer.{key}"].dtype
        assert torch.equal(tensor.float(), ours[f"layer.{key}"].float()), key


def test_compressed_tensors_reads_zero_points() -> None:
    _, rounded, tensors = written("w4a16_zeros")
    groups = rounded.zeros.shape[1]
    zeros = unpack_from_int32(tensors["weight_zero_point"], 4, torch.Size((ROWS, groups)), packed_dim=0)
    codes = unpack_from_int32(tensors["weight_packed"], 4, torch.Size((ROWS, WIDTH)))
    assert torch.equal(zeros.float() + 8, torch.from_numpy(rounded.zeros))
    assert torch.equal(codes.float() + 8, torch.from_numpy(rounded.codes))
