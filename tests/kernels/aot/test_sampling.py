"""The kernels over the vocabulary as compiled for sm_80 and sm_90."""

from __future__ import annotations

import re

import pytest

from tests.kernels.aot.table import SM_80, SM_90, launch_sampling
from tests.support.compiled_kernels import CompiledKernel, check_resources, compiling_for

KERNELS = {
    "_rank_kernel",
    "_draw_kernel",
    "_pick_kernel",
    "_apply_penalties_kernel",
    "_survey_kernel",
    "_collect_candidates_kernel",
    "_find_thresholds_kernel",
}
# Copies of 16 bytes in all loops, of a thread and a stage, for logits of 2 and of 4 bytes: 8 candidates in four loops,
# and 8 tokens in one.
COPIES = {"_find_thresholds_kernel": {4 * 2 + 1, 4 * 2 + 2}}
FUSED_MULTIPLY_ADD = re.compile(r"\bfma\.")
LOAD_OF_16_BYTES = re.compile(r"ld\.global[\w.:]*\.v4\.b32")


@pytest.fixture(scope="module", params=[SM_80, SM_90])
def compiled(request: pytest.FixtureRequest) -> list[CompiledKernel]:
    with compiling_for(request.param) as kernels:
        launch_sampling()
    return kernels


def test_every_kernel_compiles_without_spills_and_within_its_memory(compiled: list[CompiledKernel]) -> None:
    assert {kernel.name for kernel in compiled} == KERNELS
    check_resources(compiled)


def test_a_multiprocessor_holds_at_least_one_program_of_each_kernel(compiled: list[CompiledKernel]) -> None:
    for kernel in compiled:
        assert kernel.registers * kernel.num_warps * 32 <= 65_536, kernel


def test_what_is_specified_to_the_bit_has_no_fused_multiply_add(compiled: list[CompiledKernel]) -> None:
    exact = [k for k in compiled if k.name in ("_draw_kernel", "_apply_penalties_kernel")]
    assert len(exact) >= 2
    for kernel in exact:
        assert not FUSED_MULTIPLY_ADD.search(kernel.ptx), kernel
        assert "div.rn.f32" in kernel.ptx, kernel


def test_loops_over_a_row_copy_16_bytes_a_thread_ahead(compiled: list[CompiledKernel]) -> None:
    for name, accepted in COPIES.items():
        # As many blocks as there are stages: all but one before a loop, the rest inside.
        found = {k.num_async_copies / k.constants["NUM_STAGES"] for k in compiled if k.name == name}
        assert found == accepted, name
        assert max(k.shared_bytes for k in compiled if k.name == name) < 99 * 1024  # what 8.6 and 8.9 have


def test_single_passes_over_a_row_load_16_bytes_a_thread(compiled: list[CompiledKernel]) -> None:
    """Logits of 2 or 4 bytes, and of each whether it is known, one byte."""
    for name in ("_rank_kernel", "_survey_kernel", "_collect_candidates_kernel", "_draw_kernel"):
        found = {
            (16 * len(LOAD_OF_16_BYTES.findall(kernel.ptx)), kernel.constants["BLOCK"] // (32 * kernel.num_warps))
            for kernel in compiled
            if kernel.name == name
        }
        assert {loaded / tokens_per_thread for loaded, tokens_per_thread in found} == {3, 5}, name
