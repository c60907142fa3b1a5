"""The kernels of the experts as compiled for sm_80 and sm_90."""

from __future__ import annotations

import pytest

from tests.kernels.aot.table import launch_experts
from tests.support.compiled_kernels import SHARED_MEMORY_LIMIT_BYTES, CompiledKernel, compiling_for

KERNELS = {
    "_route_topk_kernel",
    "_scan_expert_kernel",
    "_count_kernel",
    "_place_kernel",
    "_grouped_gemm_kernel",
    "_gate_up_silu_kernel",
    "_down_combine_kernel",
    "_invert_kernel",
    "_combine_experts_kernel",
}


@pytest.fixture(scope="module", params=[80, 90])
def compiled(request: pytest.FixtureRequest) -> list[CompiledKernel]:
    with compiling_for(request.param) as kernels:
        launch_experts()
    return kernels


def gemms(compiled: list[CompiledKernel]) -> list[CompiledKernel]:
    return [kernel for kernel in compiled if kernel.name == "_grouped_gemm_kernel"]


def test_every_kernel_fits_the_gpu_without_spills(compiled: list[CompiledKernel]) -> None:
    assert {kernel.name for kernel in compiled} == KERNELS
    for kernel in compiled:
        assert kernel.spill_bytes == 0, kernel
        assert kernel.shared_bytes <= SHARED_MEMORY_LIMIT_BYTES[kernel.capability], kernel


def test_every_tile_is_compiled(compiled: list[CompiledKernel]) -> None:
    tiles = {(kernel.constants["BLOCK_M"], kernel.constants["GATHER"]) for kernel in gemms(compiled)}
    assert tiles == {(rows, gather) for rows in (16, 32, 64, 128) for gather in (False, True)}


def test_matrix_products_copy_16_bytes_at_a_time_while_they_multiply(compiled: list[CompiledKernel]) -> None:
    streaming = ("_gate_up_silu_kernel", "_down_combine_kernel")
    for kernel in [*gemms(compiled), *(kernel for kernel in compiled if kernel.name in streaming)]:
        assert kernel.num_async_copies > 0, kernel


def test_every_matrix_product_uses_wgmma_on_hopper(compiled: list[CompiledKernel]) -> None:
    """The small ones too: their operands are swapped, so the weight's 64 or more columns are the rows wgmma wants."""
    for kernel in gemms(compiled):
        assert kernel.uses_wgmma == (kernel.capability == 90), kernel
        assert kernel.constants["SWAP_AB"] == (kernel.capability == 90 and kernel.constants["BLOCK_M"] < 64), kernel
