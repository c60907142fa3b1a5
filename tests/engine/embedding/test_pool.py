from __future__ import annotations

import math

import pytest
import torch

from engine.checkpoint.embedding_config import Pooling
from engine.embedding import EmbeddingState, Pooler, pool
from engine.errors import NonFiniteLogits
from engine.kv_cache.block_manager import BlockHashChain
from engine.request import EmbeddingRequest

POOLINGS: list[Pooling] = ["mean", "cls", "last_token"]


def _state(num_tokens: int = 2, pooling: Pooling = "last_token", dimensions: int | None = None) -> EmbeddingState:
    token_ids = [1] * num_tokens
    return EmbeddingState(
        request=EmbeddingRequest("a", [token_ids], dimensions=dimensions),
        index=0,
        arrival=1,
        chain=BlockHashChain(16, ""),
        token_ids=token_ids,
        pooler=Pooler(pooling, num_tokens),
    )


def _hidden(*last_row: float) -> torch.Tensor:
    return torch.tensor([[1.0] * len(last_row), list(last_row)])


def test_a_vector_is_cut_to_what_its_own_request_asks_for_before_it_is_scaled() -> None:
    hidden = _hidden(3.0, 4.0, 12.0)
    cut, whole = pool([(_state(dimensions=2), 0, hidden), (_state(), 0, hidden)]).now()
    assert not isinstance(cut, NonFiniteLogits | None)
    assert not isinstance(whole, NonFiniteLogits | None)
    assert list(cut) == pytest.approx([0.6, 0.8])
    assert list(whole) == pytest.approx([3 / 13, 4 / 13, 12 / 13])


@pytest.mark.parametrize("pooling", POOLINGS)
def test_only_the_last_chunk_brings_the_vector(pooling: Pooling) -> None:
    state = _state(4, pooling)
    assert pool([(state, 0, _hidden(3.0, 4.0))]).now() == [None]
    (vector,) = pool([(state, 2, _hidden(3.0, 4.0))]).now()
    assert not isinstance(vector, NonFiniteLogits | None)
    assert math.hypot(*vector) == pytest.approx(1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("num_tokens", [2, 3])
def test_a_last_row_that_is_not_finite_fails_its_own_sequence_whether_or_not_more_is_to_come(
    bad: float, num_tokens: int
) -> None:
    spoilt, good = pool(
        [(_state(num_tokens, dimensions=1), 0, _hidden(1.0, bad)), (_state(), 0, _hidden(1.0, 0.0))]
    ).now()
    assert isinstance(spoilt, NonFiniteLogits)
    assert "before position 2" in str(spoilt)
    assert not isinstance(good, NonFiniteLogits | None)
    assert list(good) == [1.0, 0.0]


def test_a_mean_of_finite_rows_behind_one_that_is_not_fails_all_the_same() -> None:
    (spoilt,) = pool([(_state(2, "mean"), 0, torch.tensor([[math.nan, 1.0], [1.0, 1.0]]))]).now()
    assert isinstance(spoilt, NonFiniteLogits)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_no_size_is_too_small_or_too_large_to_be_scaled(size: float) -> None:
    (vector,) = pool([(_state(), 0, _hidden(3 * size, 4 * size))]).now()
    assert not isinstance(vector, NonFiniteLogits | None)
    assert list(vector) == pytest.approx([0.6, 0.8])


def test_a_vector_of_zeros_stays_one() -> None:
    (vector,) = pool([(_state(), 0, _hidden(0.0, 0.0))]).now()
    assert not isinstance(vector, NonFiniteLogits | None)
    assert list(vector) == [0.0, 0.0]


def test_the_vectors_of_a_step_are_copied_to_the_host_together(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[tuple[int, ...]] = []
    cpu = torch.Tensor.cpu

    def counted(self: torch.Tensor) -> torch.Tensor:
        copies.append(tuple(self.shape))
        return cpu(self)

    monkeypatch.setattr(torch.Tensor, "cpu", counted)
    assert None not in pool([(_state(), 0, _hidden(3.0, 4.0)) for _ in range(5)]).now()
    assert copies == [(5, 2)]
