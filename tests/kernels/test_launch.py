"""How the other kernels are launched, and which numbers of tokens lead to the same kernels, without a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import triton
from triton.runtime import driver

import kernels.triton
from kernels.dispatch import blas_library_of, launch_class_of, operations
from kernels.interface import StepShape
from kernels.triton.attention_launch import (
    AttentionLaunch,
    DecodeSplits,
    decode_launch,
    decode_splits,
    prefill_launch,
    shared_prefix_launch,
)
from kernels.triton.combine_experts import combine_launch
from kernels.triton.compilation import launch_class
from kernels.triton.dense import MANY_ROWS, gate_launch, norm_launch
from kernels.triton.experts import MAX_PAIRS_OF_ONE_PROGRAM, expert_count_launch, sort_launch
from kernels.triton.grouped_gemm import (
    LEAST_SHARED_MEMORY_BYTES,
    SHARED_MEMORY_BYTES,
    GroupedGemmLaunch,
    grouped_gemm_launch,
    row_tile,
)
from kernels.triton.gumbel import choose_launch
from kernels.triton.launch import TileLaunch, compute_capability, power_of_two_from, read_tuned
from kernels.triton.moe_small_batch import down_launch, gate_up_launch
from kernels.triton.quantised_gemm import quantised_launch, quantised_row_tile
from kernels.triton.rope_kv_store import rope_launch
from kernels.triton.sampling import best_of_blocks_launch, penalties_launch
from kernels.triton.truncation import collect_launch, search_launch

TOKENS = (1, 2, 3, 8, 20, 33, 64, 65, 100, 190, 256, 400, 700, 1024, 1300, 4096, 100_000)
LAYERS = ((128, 8), (8, 2), (64, 6), (60, 4), (256, 8), (1, 1))  # experts, top_k

VOCAB_SIZES = [1, 2, 127, 128, 129, 32_000, 128_256, 151_936, 1_000_000]

DENSE = StepShape(hidden_size=1024, intermediate_size=3072, itemsize=2)
# Qwen3-30B-A3B
EXPERTS = StepShape(2048, 6144, 2, num_experts=128, top_k=8, bucketed_min_tokens=4)


def qwen3_moe(num_tokens: int, capability: int = 90, *, gather: bool = True) -> GroupedGemmLaunch:
    return grouped_gemm_launch(num_tokens * 8, 8, 128, itemsize=2, capability=capability, gather=gather)


def is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


@pytest.mark.parametrize(("value", "expected"), [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_the_next_power_of_two(value: int, expected: int) -> None:
    assert power_of_two_from(value) == expected


def test_the_gpu_is_asked_once_for_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    active = mock.Mock()
    active.get_current_target.return_value.arch = 80
    monkeypatch.setattr(driver, "_active", active)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    for device in (0, 0, 1, 0):
        active.get_current_device.return_value = device
        assert compute_capability() == 80
    assert active.get_current_target.call_count == 2  # once a device


def test_qwen3_30b_a3b_takes_the_tuned_line_nearest_to_its_tokens() -> None:
    assert qwen3_moe(1) == GroupedGemmLaunch(16, 64, 64, 1, 4, 5, swap_ab=True)
    assert qwen3_moe(64) == GroupedGemmLaunch(16, 128, 128, 1, 4, 3, swap_ab=True)
    assert qwen3_moe(64, gather=False) == GroupedGemmLaunch(16, 256, 64, 1, 8, 3, swap_ab=True)
    assert qwen3_moe(16, gather=False) == qwen3_moe(16)
    assert qwen3_moe(55) == qwen3_moe(48)
    assert qwen3_moe(57) == qwen3_moe(64)
    assert qwen3_moe(100_000) == qwen3_moe(2048) == GroupedGemmLaunch(128, 256, 64, 16, 8, 4, swap_ab=False)


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 4096])
def test_both_products_have_the_rows_of_the_layout_s_tiles(num_tokens: int) -> None:
    launches = [qwen3_moe(num_tokens, capability, gather=gather) for capability in (80, 90) for gather in (False, True)]
    assert {launch.block_m for launch in launches} == {row_tile(num_tokens * 8, 8, 128)}


@pytest.mark.parametrize("capability", [80, 86, 90, 100])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(("num_experts", "top_k"), LAYERS)
def test_every_launch_can_run(num_experts: int, top_k: int, itemsize: int, capability: int) -> None:
    limit_bytes = SHARED_MEMORY_BYTES.get(capability, LEAST_SHARED_MEMORY_BYTES)
    for num_tokens in TOKENS:
        launch = grouped_gemm_launch(
            num_tokens * top_k, top_k, num_experts, itemsize=itemsize, capability=capability, gather=num_tokens % 2 == 0
        )
        assert min(launch.block_m, launch.block_n, launch.block_k) >= 16  # of tl.dot
        assert all(is_power_of_two(size) for size in (launch.block_m, launch.block_n, launch.block_k))
        assert launch.num_stages >= 1
        stage_bytes = (launch.block_m + launch.block_n) * launch.block_k * itemsize
        assert launch.num_stages * stage_bytes <= limit_bytes
        # wgmma takes 64 rows at once: swapped, the columns are the rows.
        assert not launch.swap_ab or (launch.block_m < 64 <= launch.block_n and capability == 90 and itemsize == 2)


@pytest.mark.parametrize("num_pairs", [1, 8, 129, 1000, MAX_PAIRS_OF_ONE_PROGRAM])
def test_one_program_sorts_few_pairs(num_pairs: int) -> None:
    launch = sort_launch(num_pairs)
    assert is_power_of_two(launch.columns)
    assert max(num_pairs, 16) <= launch.columns <= 8 * 32 * launch.num_warps


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
    assert down_launch(1408, 8, 2) == TileLaunch(8, 128, 4)  # 11 steps of 128 have no tail, and 5.5 of 256 would
    assert down_launch(768, 64, 2).columns * 64 <= 8192
    assert combine_launch(1, 72).columns == 128
    assert combine_launch(64, 2048).columns == 256
    assert combine_launch(4096, 2048).columns == 1024


@pytest.mark.parametrize(
    ("hidden_size", "few", "many"),
    [
        (128, TileLaunch(1, 128, 4), TileLaunch(16, 128, 4)),
        (1000, TileLaunch(1, 1024, 4), TileLaunch(4, 1024, 4)),
        (1024, TileLaunch(1, 1024, 4), TileLaunch(4, 1024, 4)),
        (2048, TileLaunch(1, 2048, 8), TileLaunch(2, 2048, 8)),
        (4096, TileLaunch(1, 4096, 8), TileLaunch(1, 4096, 8)),
        (5120, TileLaunch(1, 8192, 16), TileLaunch(1, 8192, 16)),
    ],
)
def test_a_norm_holds_whole_rows_and_several_where_rows_are_many(
    hidden_size: int, few: TileLaunch, many: TileLaunch
) -> None:
    assert norm_launch(1, hidden_size) == norm_launch(MANY_ROWS - 1, hidden_size) == few
    assert norm_launch(MANY_ROWS, hidden_size) == norm_launch(100 * MANY_ROWS, hidden_size) == many


@pytest.mark.parametrize(
    ("intermediate_size", "few", "many"),
    [
        (1, TileLaunch(1, 1, 1), TileLaunch(16, 1, 1)),
        (768, TileLaunch(1, 256, 1), TileLaunch(8, 256, 4)),
        (1000, TileLaunch(1, 1024, 4), TileLaunch(2, 1024, 4)),
        (3072, TileLaunch(1, 1024, 4), TileLaunch(2, 1024, 4)),
        (14336, TileLaunch(1, 1024, 4), TileLaunch(2, 1024, 4)),
    ],
)
def test_a_gate_is_cut_into_pieces_that_divide_it_where_they_can(
    intermediate_size: int, few: TileLaunch, many: TileLaunch
) -> None:
    assert gate_launch(1, intermediate_size) == gate_launch(MANY_ROWS - 1, intermediate_size) == few
    assert gate_launch(MANY_ROWS, intermediate_size) == many


@pytest.mark.parametrize("intermediate_size", [768, 1536, 3072, 9728, 12288, 14336, 17408])
def test_no_lane_idles_at_the_sizes_of_models(intermediate_size: int) -> None:
    assert intermediate_size % gate_launch(1, intermediate_size).columns == 0


@pytest.mark.parametrize(
    ("num_heads", "head_dim", "expected"),
    [
        (32, 128, TileLaunch(8, 64, 2)),
        (7, 128, TileLaunch(8, 64, 2)),
        (1, 128, TileLaunch(1, 64, 1)),
        (32, 64, TileLaunch(16, 32, 2)),
        (32, 80, TileLaunch(8, 64, 2)),
        (32, 96, TileLaunch(8, 64, 2)),
        (8, 256, TileLaunch(4, 128, 2)),
    ],
)
def test_rotation_takes_heads_until_its_tile_is_full(num_heads: int, head_dim: int, expected: TileLaunch) -> None:
    assert rope_launch(num_heads, head_dim) == expected


@pytest.mark.parametrize(("num_blocks", "block"), [(1, 1), (2, 2), (19, 32), (75, 128)])
def test_the_second_stage_takes_all_blocks_of_a_row_at_once(num_blocks: int, block: int) -> None:
    assert best_of_blocks_launch(num_blocks) == TileLaunch(1, block, num_warps=1)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_the_search_takes_a_small_row_at_once_and_others_in_large_blocks(vocab_size: int) -> None:
    launch = search_launch(vocab_size)
    assert launch.columns == 2048 or launch.columns >= vocab_size
    assert 128 <= launch.columns <= 2048
    assert launch.num_stages * launch.columns * 5 <= 80 * 1024


def test_candidates_are_collected_from_the_blocks_that_were_ranked() -> None:
    assert collect_launch() == choose_launch()


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_every_block_is_a_power_of_two_and_gives_each_thread_work(vocab_size: int) -> None:
    launches = [choose_launch(), penalties_launch()]
    for launch in launches:
        assert launch.columns & (launch.columns - 1) == 0
        assert launch.columns >= 32 * launch.num_warps


def _num_classes(shape: StepShape, tokens: range) -> int:
    with mock.patch("kernels.triton.compilation.compute_capability", return_value=90):
        return len({launch_class(count, shape) for count in tokens})


def test_a_dense_model_has_two_kinds_of_steps() -> None:
    assert _num_classes(DENSE, range(1, 4096)) == 1
    assert _num_classes(DENSE, range(1, 9000)) == 2


def test_quantised_products_have_kinds_of_steps_by_their_tiles() -> None:
    assert _num_classes(replace(DENSE, is_quantised=True), range(1, 4096)) == 6


@pytest.mark.parametrize(
    ("num_tokens", "num_programs", "num_steps", "num_splits"),
    [
        *((1, 64, 32, 4), (1, 64, 96, 8), (1, 384, 32, 1), (1, 64, 15, 1), (1, 600, 96, 1)),
        *((64, 64, 96, 4), (64, 132, 32, 2), (128, 32, 32, 4), (256, 64, 32, 2), (256, 67, 32, 1)),
    ],
)
def test_few_programs_share_the_depth_of_a_quantised_product(
    num_tokens: int, num_programs: int, num_steps: int, num_splits: int
) -> None:
    launch = quantised_launch(quantised_row_tile(num_tokens), 2, 90)
    assert launch.num_splits(num_programs, num_steps, 132) == num_splits


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 120])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("is_reordered", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 33, 65, 4096])
def test_every_launch_of_a_quantised_product_can_run(
    num_tokens: int, is_reordered: bool, itemsize: int, capability: int
) -> None:
    launch = quantised_launch(quantised_row_tile(num_tokens), itemsize, capability, is_reordered=is_reordered)
    assert all(is_power_of_two(size) and size >= 16 for size in (launch.block_m, launch.block_n))
    assert launch.block_m >= min(num_tokens, 128)
    # Of 128 inputs a step, values of 8 bits at most.
    step_bytes = 128 * (launch.block_m * itemsize + launch.block_n)
    limit_bytes = SHARED_MEMORY_BYTES.get(capability, LEAST_SHARED_MEMORY_BYTES)
    assert (launch.num_stages - 1) * step_bytes <= limit_bytes
    assert capability != 90 or itemsize == 4 or launch.block_n >= 64  # rows of wgmma


def test_experts_have_as_many_as_their_tuned_launches_and_more() -> None:
    assert _num_classes(EXPERTS, range(1, 4)) == 1
    assert 15 < _num_classes(EXPERTS, range(1, 2049)) < 30


def test_only_what_compiles_has_classes() -> None:
    assert launch_class_of(operations(torch.device("cpu")), DENSE) is None
    found = launch_class_of(kernels.triton, DENSE)
    assert found is not None
    assert found(1) == found(4095) != found(4096)


TUNED = {
    "grouped_gemm": {"128, 8": {"1": [16, 64, 64, 1, 4, 3], "64": [16, 128, 64, 1, 8, 2]}},
    "decode_attention": {"128": {"tile": 128, "num_warps": 8, "num_stages": 3}},
    "decode_splits": [256, 1024, 4],
    "prefill_attention": {"128": {"block_m": 64, "tile": 64, "num_warps": 4, "num_stages": 3}},
    "blas_library": "cublaslt",
}


def test_what_was_measured_on_this_gpu_goes_before_the_rules(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"GPU of these tests": TUNED}))
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.get_device_name", return_value="GPU of these tests") as name,
    ):
        found = read_tuned.__wrapped__(path)
        name.return_value = "another GPU"
        assert read_tuned.__wrapped__(path) == read_tuned.__wrapped__(tmp_path / "no file") == {}
    assert read_tuned.__wrapped__(path) == {}  # no GPU
    rules = grouped_gemm_launch(8 * 64, 8, 64, itemsize=2, capability=90, gather=True)
    with mock.patch("kernels.triton.launch.read_tuned", return_value=found):
        assert grouped_gemm_launch(8 * 60, 8, 128, itemsize=2, capability=90, gather=True).num_warps == 8
        assert grouped_gemm_launch(8 * 64, 8, 64, itemsize=2, capability=90, gather=True) == rules  # other experts
        assert decode_launch(128, 2, 90) == AttentionLaunch(block_m=16, tile=128, num_warps=8, num_stages=3)
        assert decode_launch(64, 2, 90).num_warps == 2  # nothing is tuned for its heads
        assert decode_launch(128, 4, 90).tile == 16  # float32, in which nothing is tuned
        assert prefill_launch(128, 2, 90) == AttentionLaunch(block_m=64, tile=64, num_warps=4, num_stages=3)
        assert prefill_launch(128, 2, 90, is_special=True).block_m == prefill_launch(96, 2, 90).block_m == 128
        assert prefill_launch(128, 4, 90).block_m == 16  # float32
        assert shared_prefix_launch(65, 128, 2, 90).block_m == 128
        assert decode_splits(1, 100_000, 132) == DecodeSplits(391, 256)
        assert decode_splits(264, 100_000, 132) == DecodeSplits(13, 1024)
        assert decode_splits(264, 5000, 132) == DecodeSplits(5, 1024)
        assert blas_library_of(kernels.triton) == "cublaslt"
    assert blas_library_of(kernels.triton) is None
    assert blas_library_of(operations(torch.device("cpu"))) is None
