"""The attention kernels as compiled for sm_80 and sm_90: registers, shared memory, copies."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.aot.attention_launches import (
    launch_attention,
    launch_float8_cache,
    launch_float32_attention,
    launch_two_steps,
    launch_windows,
)
from tests.kernels.aot.table import SM_80, SM_89, SM_90
from tests.support.compiled_kernels import (
    SHARED_MEMORY_LIMIT_BYTES,
    CompiledKernel,
    check_resources,
    compiled_kernels,
    compiling_for,
)

KERNELS = {
    *("_decode_kernel", "_prefill_kernel", "_merge_kernel", "_shared_prefix_kernel"),
    "qk_norm_rope_store_kv_kernel",  # before heads above 128 dims
}
READS_BACK = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")
OTHER_SHARED_MEMORY_LIMIT_BYTES = 101_376  # sm_86, sm_89 and sm_120 take sm_80's launches


@pytest.fixture(scope="module", params=[SM_80, SM_90])
def compiled(request: pytest.FixtureRequest) -> list[CompiledKernel]:
    with compiling_for(request.param) as kernels:
        launch_attention()
    return kernels


def named(compiled: list[CompiledKernel], name: str) -> list[CompiledKernel]:
    found = [kernel for kernel in compiled if kernel.name == name]
    assert found
    return found


def test_every_kernel_compiles_without_spills_and_within_its_memory(compiled: list[CompiledKernel]) -> None:
    assert {kernel.name for kernel in compiled} == KERNELS
    for kernel in compiled:
        limit = OTHER_SHARED_MEMORY_LIMIT_BYTES if kernel.capability == 80 else SHARED_MEMORY_LIMIT_BYTES[90]
        assert kernel.spill_bytes == 0, kernel
        assert kernel.shared_bytes <= limit, kernel


@pytest.mark.parametrize("name", ["_decode_kernel", "_prefill_kernel", "_shared_prefix_kernel"])
def test_keys_and_values_come_in_16_byte_copies_in_both_loops(compiled: list[CompiledKernel], name: str) -> None:
    for kernel in named(compiled, name):
        elements = kernel.constants["TILE"] * kernel.constants["BLOCK_D"]
        copies = 2 * 2 * elements // (16 * 32 * kernel.num_warps)  # of a thread: 2 bytes, keys and values
        # The loop over full tiles and the one over masked tiles: each starts a tile before its body and one in it.
        assert kernel.num_async_copies >= 4 * copies, kernel


def test_prefill_uses_the_warpgroup_products_of_sm_90(compiled: list[CompiledKernel]) -> None:
    for kernel in named(compiled, "_prefill_kernel"):
        assert kernel.uses_wgmma == (kernel.capability == 90), kernel


def test_shared_keys_have_blocks_of_three_sizes_large_ones_by_warpgroups(
    compiled: list[CompiledKernel],
) -> None:
    kernels = named(compiled, "_shared_prefix_kernel")
    assert {kernel.constants["BLOCK_M"] for kernel in kernels} == {16, 64, 128}
    for kernel in kernels:
        assert kernel.uses_wgmma == (kernel.capability == 90 and kernel.constants["BLOCK_M"] >= 64), kernel


def test_as_many_shared_key_programs_fit_a_processor_as_splitting_assumes(
    compiled: list[CompiledKernel],
) -> None:
    for kernel in named(compiled, "_shared_prefix_kernel"):
        if kernel.constants["BLOCK_D"] == 128:
            together = {16: 4, 64: 2, 128: 1}[kernel.constants["BLOCK_M"]]
            assert kernel.registers * 32 * kernel.num_warps * together <= 65_536, kernel
            assert kernel.shared_bytes * together <= SHARED_MEMORY_LIMIT_BYTES[kernel.capability], kernel


def test_decode_programs_of_one_warp_share_a_multiprocessor(compiled: list[CompiledKernel]) -> None:
    """Nine at 128 dims, of two tiles in flight each: 144 KiB, where 36 KiB are needed for 4.8 TB/s at 1 us."""
    found = [kernel for kernel in named(compiled, "_decode_kernel") if kernel.num_warps == 1]
    assert {kernel.constants["HEAD_DIM"] for kernel in found} == {128}
    for kernel in found:
        assert kernel.registers * 32 * 9 <= 65_536, kernel
        assert (
            kernel.shared_bytes * (9 if kernel.capability == 90 else 8) <= SHARED_MEMORY_LIMIT_BYTES[kernel.capability]
        )


def test_split_and_unsplit_decode_are_both_compiled(compiled: list[CompiledKernel]) -> None:
    assert {kernel.constants["IS_PART"] for kernel in named(compiled, "_decode_kernel")} == {False, True}


@pytest.mark.parametrize("name", ["_decode_kernel", "_prefill_kernel"])
def test_rows_with_and_without_shared_keys_are_both_compiled(compiled: list[CompiledKernel], name: str) -> None:
    assert {kernel.constants["HAS_PREFIX"] for kernel in named(compiled, name)} == {False, True}


def test_decode_is_compiled_with_the_heads_as_projected_up_to_128_dims(compiled: list[CompiledKernel]) -> None:
    found = [kernel.constants for kernel in named(compiled, "_decode_kernel")]
    kinds = {(constants["BLOCK_D"], constants["IS_PROJECTED"]) for constants in found}
    assert kinds == {(64, False), (64, True), (128, False), (128, True), (256, False)}


def test_padded_heads_are_taken_as_projected_on_hopper_alone(compiled: list[CompiledKernel]) -> None:
    found = named(compiled, "_decode_kernel")
    padded = [kernel for kernel in found if kernel.constants["HEAD_DIM"] in (80, 96)]
    assert any(kernel.constants["IS_PROJECTED"] for kernel in padded) is (padded[0].capability == 90)
    assert {(kernel.constants["TILE"], kernel.num_warps) for kernel in padded} == {(64, 4)}


@pytest.mark.aot
def test_steps_of_other_sizes_use_the_same_kernels() -> None:
    with compiling_for(90) as kernels:
        launch_two_steps()
    plain = [*["_decode_kernel"] * 2, "_merge_kernel", "_prefill_kernel"]  # heads rotated before, and in it
    sharing = ["_decode_kernel", "_prefill_kernel", *["_shared_prefix_kernel"] * 2]  # float32 parts
    assert sorted(kernel.name for kernel in kernels) == sorted(plain + sharing)


@pytest.mark.aot
def test_nothing_is_read_back_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a wrapper looked at the values of a tensor")

    for name in READS_BACK:
        monkeypatch.setattr(torch.Tensor, name, refuse)
    with compiling_for(90):
        launch_attention()


@pytest.mark.parametrize("capability", [SM_80, SM_90])
def test_windows_fit_too_and_decode_programs_share_a_processor(capability: int) -> None:
    with compiling_for(capability) as kernels:
        launch_windows()
    for kernel in kernels:
        assert kernel.spill_bytes == 0, kernel
        limit = OTHER_SHARED_MEMORY_LIMIT_BYTES if capability == 80 else SHARED_MEMORY_LIMIT_BYTES[90]
        assert kernel.shared_bytes <= limit, kernel
        if kernel.name == "_decode_kernel":
            assert kernel.constants["WINDOW"] == 1024
            together = {64: 6, 80: 2, 128: 9, 256: 2}[kernel.constants["HEAD_DIM"]]
            assert kernel.registers * 32 * kernel.num_warps * together <= 65_536, kernel


@pytest.fixture(scope="module", params=[SM_89, SM_90])
def of_float8(request: pytest.FixtureRequest) -> list[CompiledKernel]:
    return [
        kernel for kernel in compiled_kernels(request.param, [launch_float8_cache]) if "KV_CACHE" in kernel.constants
    ]


def test_a_float8_cache_is_compiled_into_every_kernel_that_has_it_and_fits(of_float8: list[CompiledKernel]) -> None:
    assert {kernel.name for kernel in of_float8} == KERNELS - {"_merge_kernel"}
    check_resources(of_float8)


def test_float8_keys_come_in_16_byte_copies_and_are_converted_late(of_float8: list[CompiledKernel]) -> None:
    """As bytes into shared memory, a tile before and one in the body of each loop. Values come so where products are by
    warpgroups, and in pieces of 4 bytes, as they lie there, where not.
    """
    for kernel in (kernel for kernel in of_float8 if "TILE" in kernel.constants):
        assert "cvt.rn.f16x2.e4m3x2" in kernel.ptx, kernel
        copies = kernel.constants["TILE"] * kernel.constants["BLOCK_D"] // (16 * 32 * kernel.num_warps)
        num_loops = 1 if kernel.name == "_prefill_kernel" and kernel.constants["WINDOW"] else 2
        assert kernel.num_async_copies >= 2 * num_loops * copies * (2 if kernel.uses_wgmma else 1), kernel
    for kernel in named(of_float8, "qk_norm_rope_store_kv_kernel"):
        assert "cvt.rn.satfinite.e4m3x2" in kernel.ptx, kernel


def test_nine_decode_programs_of_a_float8_cache_share_a_processor(of_float8: list[CompiledKernel]) -> None:
    """Of 128 dims, as with keys in the model dtype; of padded heads three."""
    for kernel in named(of_float8, "_decode_kernel"):
        if kernel.constants["BLOCK_D"] == 128:
            together = 9 if kernel.constants["HEAD_DIM"] == 128 else 3
            assert kernel.registers * 32 * kernel.num_warps * together <= 65_536, kernel
            assert kernel.shared_bytes * 4 <= SHARED_MEMORY_LIMIT_BYTES[kernel.capability], kernel


@pytest.mark.parametrize("capability", [SM_80, SM_90])
def test_float32_fits_too(capability: int) -> None:
    with compiling_for(capability) as kernels:
        launch_float32_attention()
    for kernel in kernels:
        assert kernel.spill_bytes == 0, kernel
        assert kernel.shared_bytes <= OTHER_SHARED_MEMORY_LIMIT_BYTES, kernel
