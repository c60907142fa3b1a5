from __future__ import annotations

import pytest

from kernels.triton.gumbel import gumbel_launch
from kernels.triton.sampling import VocabLaunch, argmax_launch, best_of_blocks_launch, penalties_launch
from kernels.triton.truncation import collect_launch, mask_launch, search_launch

VOCAB_SIZES = [1, 2, 127, 128, 129, 32_000, 128_256, 151_936, 1_000_000]


def test_argmax_takes_wide_blocks_where_they_are_enough_for_every_multiprocessor() -> None:
    # 151,936 tokens are 19 wide blocks: 6 rows leave some of 132 multiprocessors idle, 7 do not.
    assert argmax_launch(6, 151_936) == VocabLaunch(2048, num_warps=4)
    assert argmax_launch(7, 151_936) == argmax_launch(512, 151_936) == VocabLaunch(8192, num_warps=8)
    assert argmax_launch(1, 37).block == 2048


@pytest.mark.parametrize(("num_blocks", "block"), [(1, 1), (2, 2), (19, 32), (75, 128)])
def test_the_second_stage_takes_all_blocks_of_a_row_at_once(num_blocks: int, block: int) -> None:
    assert best_of_blocks_launch(num_blocks) == VocabLaunch(block, num_warps=1)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_the_search_of_a_row_takes_a_small_row_at_once_and_others_in_large_blocks(vocab_size: int) -> None:
    for launch, largest in ((collect_launch(vocab_size), 8192), (search_launch(vocab_size), 4096)):
        assert launch.block == largest or launch.block >= vocab_size
        assert 128 <= launch.block <= largest
        assert launch.num_stages * launch.block * 4 <= 96 * 1024


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_every_block_is_a_power_of_two_and_gives_each_thread_work(vocab_size: int) -> None:
    launches = [argmax_launch(rows, vocab_size) for rows in (1, 64)]
    launches += [gumbel_launch(), penalties_launch(), mask_launch()]
    for launch in launches:
        assert launch.block & (launch.block - 1) == 0
        assert launch.block >= 32 * launch.num_warps
