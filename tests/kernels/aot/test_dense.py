"""The kernels over rows as compiled for sm_80 and sm_90."""

from __future__ import annotations

import re

import pytest

from tests.kernels.aot.table import launch_elementwise
from tests.support.compiled_kernels import SHARED_MEMORY_LIMIT_BYTES, CompiledKernel, compiling_for

KERNELS = {"rms_norm_kernel", "silu_and_mul_kernel", "qk_norm_rope_store_kv_kernel"}
LOAD = r"ld\.global(?:\.\w+(?:::\w+)?)*?\.(v\d\.)?b(\d+)"
STORE = r"st\.global(?:\.\w+(?:::\w+)?)*?\.(v\d\.)?b(\d+)"
# 65,536 registers of a multiprocessor: up to so many a thread, four programs of 128 threads and two of 256 fit.
MAX_REGISTERS = 128


@pytest.fixture(scope="module", params=[80, 90])
def compiled(request: pytest.FixtureRequest) -> list[CompiledKernel]:
    with compiling_for(request.param) as kernels:
        launch_elementwise()
    return kernels


def widths_bytes(pattern: str, kernel: CompiledKernel) -> list[int]:
    """Bytes each of a kernel's global loads or stores moves for one thread."""
    return [int(vector[1:-1] or 1) * int(bits) // 8 if vector else int(bits) // 8
            for vector, bits in re.findall(pattern, kernel.ptx)]  # fmt: skip


def test_every_kernel_compiles_without_spills_and_within_its_memory(compiled: list[CompiledKernel]) -> None:
    assert {kernel.name for kernel in compiled} == KERNELS
    for kernel in compiled:
        assert kernel.spill_bytes == 0, kernel
        assert kernel.shared_bytes <= SHARED_MEMORY_LIMIT_BYTES[kernel.capability], kernel
        assert kernel.registers <= MAX_REGISTERS, kernel


def test_every_access_of_a_row_moves_16_bytes_a_thread(compiled: list[CompiledKernel]) -> None:
    # Hidden sizes that are no multiple of 16 elements are read element by element; no model has one.
    rows = [k for k in compiled if k.name != "qk_norm_rope_store_kv_kernel" and k.constants.get("HIDDEN_SIZE") != 1000]
    assert len(rows) >= 20
    for kernel in rows:
        assert set(widths_bytes(LOAD, kernel)) == {16}, kernel
        assert set(widths_bytes(STORE, kernel)) == {16}, kernel


def test_heads_are_read_and_written_16_bytes_a_thread(compiled: list[CompiledKernel]) -> None:
    heads = [k for k in compiled if k.name == "qk_norm_rope_store_kv_kernel" and k.constants["HEAD_DIM"] != 64]
    assert len(heads) >= 6
    for kernel in heads:
        assert widths_bytes(LOAD, kernel).count(16) >= 6, kernel  # two halves of queries, of keys, of values
        assert set(widths_bytes(STORE, kernel)) == {16}, kernel
