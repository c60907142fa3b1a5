from __future__ import annotations

import pytest

from kernels.triton.experts import combine_launch, expert_count_launch, expert_scan_launch
from kernels.triton.grouped_gemm import (
    LEAST_SHARED_MEMORY_BYTES,
    SHARED_MEMORY_BYTES,
    GroupedGemmLaunch,
    grouped_gemm_launch,
)
from kernels.triton.launch import power_of_two_from
from kernels.triton.moe_small_batch import down_launch, gate_up_launch

TOKENS = (1, 2, 3, 8, 20, 33, 64, 65, 100, 190, 256, 400, 700, 1024, 1300, 4096, 100_000)
LAYERS = ((128, 8), (8, 2), (64, 6), (60, 4), (256, 8), (1, 1))  # experts, top_k


def qwen3_moe(num_tokens: int, capability: int = 90, itemsize: int = 2) -> GroupedGemmLaunch:
    return grouped_gemm_launch(num_tokens * 8, 8, 128, itemsize=itemsize, capability=capability)


def is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


@pytest.mark.parametrize(("value", "expected"), [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_the_next_power_of_two(value: int, expected: int) -> None:
    assert power_of_two_from(value) == expected


def test_qwen3_30b_a3b_takes_the_tuned_line_nearest_to_its_tokens() -> None:
    assert qwen3_moe(1) == GroupedGemmLaunch(16, 64, 64, 1, 4, 5, swap_ab=True)
    assert qwen3_moe(64) == GroupedGemmLaunch(16, 256, 128, 1, 8, 2, swap_ab=True)
    assert qwen3_moe(55) == qwen3_moe(48)
    assert qwen3_moe(57) == qwen3_moe(64)
    assert qwen3_moe(100_000) == qwen3_moe(2048) == GroupedGemmLaunch(128, 256, 64, 16, 8, 4, swap_ab=False)


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 4096])
def test_the_derived_rule_gives_the_rows_of_the_tuned_line(num_tokens: int) -> None:
    assert qwen3_moe(num_tokens, capability=80).block_m == qwen3_moe(num_tokens, capability=90).block_m


@pytest.mark.parametrize("capability", [80, 86, 90, 100])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(("num_experts", "top_k"), LAYERS)
def test_every_launch_can_run(num_experts: int, top_k: int, itemsize: int, capability: int) -> None:
    limit_bytes = SHARED_MEMORY_BYTES.get(capability, LEAST_SHARED_MEMORY_BYTES)
    for num_tokens in TOKENS:
        launch = grouped_gemm_launch(num_tokens * top_k, top_k, num_experts, itemsize=itemsize, capability=capability)
        assert min(launch.block_m, launch.block_n, launch.block_k) >= 16  # of tl.dot
        assert all(is_power_of_two(size) for size in (launch.block_m, launch.block_n, launch.block_k))
        assert launch.num_stages >= 1
        stage_bytes = (launch.block_m + launch.block_n) * launch.block_k * itemsize
        assert launch.num_stages * stage_bytes <= limit_bytes
        # wgmma takes 64 rows at once: swapped, the columns are the rows.
        assert not launch.swap_ab or (launch.block_m < 64 <= launch.block_n and capability == 90 and itemsize == 2)


@pytest.mark.parametrize("num_pairs", [0, 1, 8, 129, 1024, 4096])
def test_few_ids_are_read_at_once(num_pairs: int) -> None:
    launch = expert_scan_launch(num_pairs)
    assert is_power_of_two(launch.columns)
    assert 128 <= launch.columns <= 1024
    assert launch.columns >= min(num_pairs, 1024)


def test_a_block_of_ids_is_compared_in_whole_parts() -> None:
    launch = expert_count_launch()
    assert launch.columns % launch.rows == 0


@pytest.mark.parametrize("itemsize", [2, 4])
def test_the_short_cut_fills_the_gpu_with_one_token(itemsize: int) -> None:
    first, second = gate_up_launch(2048, itemsize), down_launch(768, 8, itemsize)
    assert 8 * 768 // first.rows >= 4 * 132
    assert 2048 // second.rows >= 3 * 132
    assert 2048 % first.columns == 768 % second.columns == 0  # no tails


def test_tiles_are_no_wider_than_what_they_cover() -> None:
    assert gate_up_launch(72, 2).columns == 128
    assert down_launch(40, 64, 2).columns == 64
    assert down_launch(40, 64, 2).rows == 1
    assert down_launch(768, 64, 2).columns * 64 <= 8192
    assert combine_launch(1, 72).columns == 128
    assert combine_launch(64, 2048).columns == 256
    assert combine_launch(4096, 2048).columns == 1024
