from __future__ import annotations

import pytest
import torch

from engine.checkpoint.embedding_config import Pooling
from engine.embedding import Pooler

NUM_TOKENS = 37
HIDDEN = torch.randn(NUM_TOKENS, 8, generator=torch.Generator().manual_seed(0))
EXPECTED: dict[Pooling, torch.Tensor] = {"mean": HIDDEN.mean(dim=0), "cls": HIDDEN[0], "last_token": HIDDEN[-1]}


def _pooled(pooling: Pooling, ranges: list[tuple[int, int]]) -> torch.Tensor:
    pooler = Pooler(pooling, NUM_TOKENS)
    for start, end in ranges:
        assert not pooler.is_complete
        pooler.add(start, HIDDEN[start:end])
    assert pooler.is_complete
    return pooler.vector


@pytest.mark.parametrize("pooling", EXPECTED)
def test_each_pooling_is_what_its_name_says(pooling: Pooling) -> None:
    torch.testing.assert_close(_pooled(pooling, [(0, NUM_TOKENS)]), EXPECTED[pooling])


@pytest.mark.parametrize("pooling", EXPECTED)
def test_no_pooling_keeps_the_states_of_a_chunk(pooling: Pooling) -> None:
    pooler = Pooler(pooling, NUM_TOKENS)
    pooler.add(0, HIDDEN)
    assert pooler.vector.untyped_storage().nbytes() == 8 * 4


@pytest.mark.parametrize("pooling", EXPECTED)
@pytest.mark.parametrize(
    "ranges",
    [
        [(0, 16), (16, 32), (32, NUM_TOKENS)],
        [(index, index + 1) for index in range(NUM_TOKENS)],
        [(0, 20), (0, 10), (10, 30), (16, NUM_TOKENS)],  # preempted, and begun again in other chunks
    ],
)
def test_chunks_do_not_change_a_bit(pooling: Pooling, ranges: list[tuple[int, int]]) -> None:
    assert torch.equal(_pooled(pooling, ranges), _pooled(pooling, [(0, NUM_TOKENS)]))


def test_the_last_token_does_not_need_those_before_it() -> None:
    assert torch.equal(_pooled("last_token", [(32, NUM_TOKENS)]), HIDDEN[-1])


def test_there_is_no_vector_before_the_last_position() -> None:
    pooler = Pooler("mean", NUM_TOKENS)
    pooler.add(0, HIDDEN[:5])
    with pytest.raises(ValueError, match="5 of 37 positions"):
        _ = pooler.vector
