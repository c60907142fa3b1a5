from __future__ import annotations

import pytest

from kernels.triton.dense import MANY_ROWS, RowLaunch, gate_launch, norm_launch, rope_launch


@pytest.mark.parametrize(
    ("hidden_size", "few", "many"),
    [
        (128, RowLaunch(1, 128, 4), RowLaunch(16, 128, 4)),
        (1000, RowLaunch(1, 1024, 4), RowLaunch(4, 1024, 4)),
        (1024, RowLaunch(1, 1024, 4), RowLaunch(4, 1024, 4)),
        (2048, RowLaunch(1, 2048, 8), RowLaunch(2, 2048, 8)),
        (4096, RowLaunch(1, 4096, 8), RowLaunch(1, 4096, 8)),
        (5120, RowLaunch(1, 8192, 16), RowLaunch(1, 8192, 16)),
    ],
)
def test_a_norm_holds_whole_rows_and_several_where_rows_are_many(
    hidden_size: int, few: RowLaunch, many: RowLaunch
) -> None:
    assert norm_launch(1, hidden_size) == norm_launch(MANY_ROWS - 1, hidden_size) == few
    assert norm_launch(MANY_ROWS, hidden_size) == norm_launch(100 * MANY_ROWS, hidden_size) == many


@pytest.mark.parametrize(
    ("intermediate_size", "few", "many"),
    [
        (1, RowLaunch(1, 1, 1), RowLaunch(16, 1, 1)),
        (768, RowLaunch(1, 256, 1), RowLaunch(8, 256, 4)),
        (1000, RowLaunch(1, 1024, 4), RowLaunch(2, 1024, 4)),
        (3072, RowLaunch(1, 1024, 4), RowLaunch(2, 1024, 4)),
        (14336, RowLaunch(1, 1024, 4), RowLaunch(2, 1024, 4)),
    ],
)
def test_a_gate_is_cut_into_pieces_that_divide_it_where_they_can(
    intermediate_size: int, few: RowLaunch, many: RowLaunch
) -> None:
    assert gate_launch(1, intermediate_size) == gate_launch(MANY_ROWS - 1, intermediate_size) == few
    assert gate_launch(MANY_ROWS, intermediate_size) == many


@pytest.mark.parametrize("intermediate_size", [768, 1536, 3072, 9728, 12288, 14336, 17408])
def test_no_lane_idles_at_the_sizes_of_models(intermediate_size: int) -> None:
    assert intermediate_size % gate_launch(1, intermediate_size).block_width == 0


@pytest.mark.parametrize(
    ("num_heads", "head_dim", "expected"),
    [
        (32, 128, RowLaunch(8, 64, 2)),
        (7, 128, RowLaunch(8, 64, 2)),
        (1, 128, RowLaunch(1, 64, 1)),
        (32, 64, RowLaunch(16, 32, 2)),
        (32, 80, RowLaunch(8, 64, 2)),
        (32, 96, RowLaunch(8, 64, 2)),
        (8, 256, RowLaunch(4, 128, 2)),
    ],
)
def test_rotation_takes_heads_until_its_tile_is_full(num_heads: int, head_dim: int, expected: RowLaunch) -> None:
    assert rope_launch(num_heads, head_dim) == expected
