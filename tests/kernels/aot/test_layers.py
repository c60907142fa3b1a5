"""The kernels of a layer but attention, as compiled for sm_80 and sm_90: over rows, and of the experts."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

import kernels.triton
from engine.models.decoder import AttentionLayer, DecoderLayer, DenseMLP, ForwardBatch, LayerNorms, MoeMLP
from kernels.interface import Operations
from kernels.operands import AttentionRows
from kernels.triton import quantised
from kernels.triton.quantised import pack
from tests.kernels.aot.table import (
    DTYPE,
    INT8,
    SM_80,
    SM_90,
    launch_elementwise,
    launch_experts,
    quantised_weight,
)
from tests.support.compiled_kernels import (
    CompiledKernel,
    check_resources,
    compiling_for,
    recorded_specialisations,
)

ROW_KERNELS = {"rms_norm_kernel", "silu_and_mul_kernel", "qk_norm_rope_store_kv_kernel"}
EXPERT_KERNELS = {
    "_route_topk_kernel",
    "_sort_kernel",
    "_route_and_sort_kernel",
    "_count_kernel",
    "_place_kernel",
    "_grouped_gemm_kernel",
    "_gate_up_silu_kernel",
    "_down_combine_kernel",
    "_combine_experts_kernel",
    "_add_experts_rms_norm_kernel",
}
LOAD = r"ld\.global(?:\.\w+(?:::\w+)?)*?\.(v\d\.)?b(\d+)"
STORE = r"st\.global(?:\.\w+(?:::\w+)?)*?\.(v\d\.)?b(\d+)"
# 65,536 registers of a multiprocessor: up to so many a thread, four programs of 128 threads and two of 256 fit.
MAX_REGISTERS = 128


@pytest.fixture(scope="module", params=[SM_80, SM_90])
def over_rows(request: pytest.FixtureRequest) -> list[CompiledKernel]:
    with compiling_for(request.param) as kernels:
        launch_elementwise()
    return kernels


def widths_bytes(pattern: str, kernel: CompiledKernel) -> list[int]:
    """Bytes each of a kernel's global loads or stores moves for one thread."""
    return [int(vector[1:-1] or 1) * int(bits) // 8 if vector else int(bits) // 8
            for vector, bits in re.findall(pattern, kernel.ptx)]  # fmt: skip


def test_every_kernel_over_rows_compiles_without_spills(over_rows: list[CompiledKernel]) -> None:
    assert {kernel.name for kernel in over_rows} == ROW_KERNELS
    check_resources(over_rows)
    for kernel in over_rows:
        assert kernel.registers <= MAX_REGISTERS, kernel


def test_every_access_of_a_row_moves_16_bytes_a_thread(over_rows: list[CompiledKernel]) -> None:
    # Hidden sizes that are no multiple of 16 elements are read element by element; no model has one.
    rows = [k for k in over_rows if k.name != "qk_norm_rope_store_kv_kernel" and k.constants.get("HIDDEN_SIZE") != 1000]
    assert len(rows) >= 20
    for kernel in rows:
        assert set(widths_bytes(LOAD, kernel)) == {16}, kernel
        assert set(widths_bytes(STORE, kernel)) == {16}, kernel


def test_heads_are_read_and_written_16_bytes_a_thread(over_rows: list[CompiledKernel]) -> None:
    heads = [k for k in over_rows if k.name == "qk_norm_rope_store_kv_kernel" and k.constants["HEAD_DIM"] != 64]
    assert len(heads) >= 6
    for kernel in heads:
        assert widths_bytes(LOAD, kernel).count(16) >= 6, kernel  # two halves of queries, of keys, of values
        assert set(widths_bytes(STORE, kernel)) == {16}, kernel


@pytest.fixture(scope="module", params=[SM_80, SM_90])
def of_experts(request: pytest.FixtureRequest) -> list[CompiledKernel]:
    with compiling_for(request.param) as kernels:
        launch_experts()
    return kernels


def gemms(of_experts: list[CompiledKernel]) -> list[CompiledKernel]:
    return [kernel for kernel in of_experts if kernel.name == "_grouped_gemm_kernel"]


def test_every_kernel_of_experts_compiles_without_spills(of_experts: list[CompiledKernel]) -> None:
    assert {kernel.name for kernel in of_experts} == EXPERT_KERNELS
    check_resources(of_experts)


def test_every_tile_is_compiled(of_experts: list[CompiledKernel]) -> None:
    tiles = {(kernel.constants["BLOCK_M"], kernel.constants["GATHER"]) for kernel in gemms(of_experts)}
    assert tiles == {(rows, gather) for rows in (16, 32, 64, 128) for gather in (False, True)}


def test_matrix_products_copy_16_bytes_at_a_time_while_they_multiply(of_experts: list[CompiledKernel]) -> None:
    streaming = ("_gate_up_silu_kernel", "_down_combine_kernel")
    for kernel in [*gemms(of_experts), *(kernel for kernel in of_experts if kernel.name in streaming)]:
        assert kernel.num_async_copies > 0, kernel


def test_a_multiprocessor_holds_two_programs_of_a_step_of_48_to_256_tokens(of_experts: list[CompiledKernel]) -> None:
    """Of 65,536 registers and 228 KiB on Hopper, of which each program takes one KiB more than it asks for."""
    lines = [(16, 128, 128, 3), (16, 256, 64, 3), (32, 128, 64, 4)]
    found = set()
    for kernel in gemms(of_experts):
        line = (*(kernel.constants[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K")), kernel.num_stages)
        if kernel.capability == 90 and line in lines:
            found.add(line)
            assert 2 * kernel.registers * kernel.num_warps * 32 <= 65_536, kernel
            assert 2 * (kernel.shared_bytes + 1024) <= 233_472, kernel
    if of_experts[0].capability == 90:
        assert found == set(lines)


def test_a_multiprocessor_holds_two_programs_of_a_product_of_int8() -> None:
    """With 150 registers, one a multiprocessor, a product of 8,192 rows took 1.90 ms on an H200; with 123, 1.33."""
    with compiling_for(90) as found:
        quantised.linear(torch.empty(512, 4096, dtype=DTYPE), quantised_weight(INT8, 4096, 4096))
    kernel = next(kernel for kernel in found if kernel.name == "_quantised_gemm_kernel")
    assert kernel.constants["BLOCK_M"] == kernel.constants["BLOCK_N"] == 128
    assert 2 * kernel.registers * kernel.num_warps * 32 <= 65_536, kernel
    assert 2 * (kernel.shared_bytes + 1024) <= 233_472, kernel


def test_every_matrix_product_uses_wgmma_on_hopper(of_experts: list[CompiledKernel]) -> None:
    """The small ones too: their operands are swapped, so the weight's 64 or more columns are the rows wgmma wants."""
    for kernel in gemms(of_experts):
        assert kernel.uses_wgmma == (kernel.capability == 90), kernel
        assert kernel.constants["SWAP_AB"] == (kernel.capability == 90 and kernel.constants["BLOCK_M"] < 64), kernel


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """Names what a GPU would be given: kernels of ours, and operations of PyTorch that compute or copy."""

    FREE = (
        "empty",
        "zeros",
        "view",
        "_unsafe_view",
        "t",
        "transpose",
        "slice",
        "select",
        "split",
        "detach",
        "expand",
        "reshape",
    )

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.names: list[str] = []
        patch.setattr(JITFunction, "run", lambda kernel, *_, **__: self.names.append(kernel.fn.__name__))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in self.FREE:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def launches_of_a_layer(
    mlp: DenseMLP | MoeMLP, num_rows: int, patch: pytest.MonkeyPatch, *, is_biased_and_scaled: bool = False
) -> list[str]:
    """Of the second of two layers in a decode step of rows of at most 8,192 tokens, as captured: hidden size 64, 8 KV
    heads. Biased are queries, keys and values; scaled is what is added to the residual.
    """
    ops = cast("Operations", kernels.triton)
    qkv, out = (pack(torch.zeros(*shape, dtype=torch.bfloat16)) for shape in ((24 * 16, 64), (64, 8 * 16)))
    norm = torch.ones(64, dtype=torch.bfloat16)
    bias, multiplier = (norm.repeat(6), 0.5) if is_biased_and_scaled else (None, 1.0)
    attention = AttentionLayer(ops, qkv, out, (norm[:16], norm[:16], 1e-6), torch.zeros(99, 16), 0.25, bias)
    layer = DecoderLayer(ops, LayerNorms(norm, None, norm, None), attention, mlp, 1e-6, multiplier)
    rows = AttentionRows(
        block_tables=torch.zeros(num_rows, 512, dtype=torch.int32),
        cu_seqlens_q=torch.arange(num_rows + 1, dtype=torch.int32),
        seq_lens=torch.ones(num_rows, dtype=torch.int32),
        query_lens=(1,) * num_rows,
        kv_lens=(8192,) * num_rows,
    )
    ids = torch.zeros(num_rows, dtype=torch.int64)
    batch = ForwardBatch(ids, ids, ids, ids, ids[:0], (), rows, None, num_rows)
    x, residual = (torch.zeros(num_rows, 64, dtype=torch.bfloat16) for _ in range(2))
    keys, values = (torch.zeros(8, 16, 8, 16, dtype=torch.bfloat16) for _ in range(2))
    with torch.inference_mode(), recorded_specialisations(90), Launches(patch) as launches:
        output, residual = layer.forward(x, residual, batch, keys, values)
        num_of_first = len(launches.names)
        layer.forward(output, residual, batch, keys, values)
    names: list[str] = launches.names[num_of_first:]
    return names


def test_a_dense_layer_is_eight_launches_of_a_captured_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = cast("Operations", kernels.triton)
    gate_up, down = (pack(torch.zeros(*shape, dtype=torch.bfloat16)) for shape in ((512, 64), (64, 256)))
    names = launches_of_a_layer(DenseMLP(ops, gate_up, down), 64, monkeypatch)
    assert names == [
        *("rms_norm_kernel", "linear", "_decode_kernel", "linear"),
        *("rms_norm_kernel", "linear", "silu_and_mul_kernel", "linear"),
    ]


def experts_of_a_layer() -> MoeMLP:
    shapes = ((32, 64), (32, 64, 64), (32, 64, 32))
    router, gate_up, down = (pack(torch.zeros(*shape, dtype=torch.bfloat16)) for shape in shapes)
    return MoeMLP(cast("Operations", kernels.triton), router, gate_up, down, 8, True, 4)


@pytest.mark.parametrize("num_rows", [64, 128])
def test_an_expert_layer_is_nine_launches_of_a_captured_step(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names = launches_of_a_layer(experts_of_a_layer(), num_rows, monkeypatch)
    assert names == [
        *("_add_experts_rms_norm_kernel", "linear", "_decode_kernel", "linear"),
        *("rms_norm_kernel", "linear", "_route_and_sort_kernel", "_grouped_gemm_kernel", "_grouped_gemm_kernel"),
    ]


def test_a_bias_comes_before_attention_and_experts_are_summed_to_be_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    names = launches_of_a_layer(experts_of_a_layer(), 64, monkeypatch, is_biased_and_scaled=True)
    assert names == [
        *("rms_norm_kernel", "linear", "add_", "_decode_kernel", "linear", "mul_", "rms_norm_kernel"),
        *("linear", "_route_and_sort_kernel", "_grouped_gemm_kernel", "_grouped_gemm_kernel"),
        *("_combine_experts_kernel", "mul_"),
    ]
