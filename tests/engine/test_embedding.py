"""Embedding requests that are equal, aborted, refused or fail, and how hidden states are pooled."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from engine.checkpoint.embedding_config import Pooling
from engine.embedding import EmbeddingState, Pooler, pool
from engine.engine import Engine
from engine.errors import InvalidRequest, NonFiniteLogits, PromptTooLong
from engine.kv_cache.block_manager import BlockHashChain
from engine.request import EmbeddingRequest
from tests.support.engines import OpenEngine, greedy_request, load_engine, run_all
from tests.support.tiny_checkpoint import ReferenceEmbedder, make_checkpoint, write_pooling

INPUTS = [list(range(40)), [7, 8, 9]]

POOLINGS: list[Pooling] = ["mean", "cls", "last_token"]

NUM_TOKENS = 37
HIDDEN = torch.randn(NUM_TOKENS, 8, generator=torch.Generator().manual_seed(0))
EXPECTED: dict[Pooling, torch.Tensor] = {"mean": HIDDEN.mean(dim=0), "cls": HIDDEN[0], "last_token": HIDDEN[-1]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), is_matryoshka=True)


@pytest.fixture
def engine(checkpoint: Path) -> Engine:
    return load_engine(checkpoint)


def test_equal_requests_are_computed_once_and_each_gets_the_vectors(engine: Engine) -> None:
    outputs = run_all(engine, [EmbeddingRequest(name, INPUTS) for name in "abc"])
    assert outputs["a"].embeddings == outputs["b"].embeddings == outputs["c"].embeddings
    assert [outputs[name].num_cached_tokens for name in "abc"] == [0, 43, 43]
    assert engine.stats().num_duplicates == 2


@pytest.mark.parametrize(
    "other",
    [
        EmbeddingRequest("b", INPUTS, tenant="other"),
        EmbeddingRequest("b", INPUTS, dimensions=8),
        EmbeddingRequest("b", [INPUTS[0] + INPUTS[1]]),
        EmbeddingRequest("b", [INPUTS[0]]),
    ],
)
def test_other_tenants_dimensions_and_inputs_are_others(engine: Engine, other: EmbeddingRequest) -> None:
    run_all(engine, [EmbeddingRequest("a", INPUTS), other])
    assert engine.stats().num_duplicates == 0


def test_without_deduplication_each_is_computed(checkpoint: Path) -> None:
    engine = load_engine(checkpoint, {"engine.deduplicate": "false"})
    run_all(engine, [EmbeddingRequest("a", INPUTS), EmbeddingRequest("b", INPUTS)])
    assert engine.stats().num_duplicates == 0


def test_another_tenants_kv_is_not_hit(engine: Engine) -> None:
    run_all(engine, [EmbeddingRequest("a", INPUTS, tenant="one")])
    assert run_all(engine, [EmbeddingRequest("b", INPUTS, tenant="two")])["b"].num_cached_tokens == 0
    assert run_all(engine, [EmbeddingRequest("c", INPUTS, tenant="one")])["c"].num_cached_tokens == 32


def test_an_aborted_one_leaves_the_work_to_its_equals(engine: Engine) -> None:
    for name in "abc":
        engine.add_request(EmbeddingRequest(name, INPUTS))
    assert engine.abort("a")
    outputs = run_all(engine, [])
    assert outputs["a"].was_aborted
    assert outputs["b"].embeddings == outputs["c"].embeddings != ()


def test_abort_frees_the_blocks_at_once(checkpoint: Path) -> None:
    engine = load_engine(checkpoint, {"engine.max_num_batched_tokens": "16", "engine.max_num_seqs": "8"})
    engine.add_request(EmbeddingRequest("a", INPUTS))
    assert engine.step() == []
    assert engine.stats().num_free_blocks < engine.stats().num_blocks - 1
    assert engine.resume_state("a") is None  # half a vector is no use to another worker
    assert engine.due_resume_states() == {}
    assert engine.abort("a")
    assert engine.stats().num_free_blocks == engine.stats().num_blocks - 1
    engine.check_integrity()
    (output,) = engine.step()
    assert (output.was_aborted, output.embeddings) == (True, ())


def test_closing_ends_embeddings_too(engine: Engine) -> None:
    engine.add_request(EmbeddingRequest("a", INPUTS))
    engine.close()
    assert [output.was_aborted for output in engine.step()] == [True]


def test_a_more_urgent_equal_makes_the_work_urgent(checkpoint: Path) -> None:
    engine = load_engine(checkpoint, {"engine.max_num_batched_tokens": "16", "engine.max_num_seqs": "1"})
    engine.add_request(EmbeddingRequest("slow", [[1] * 16], priority=5))
    engine.add_request(EmbeddingRequest("a", [[2] * 16], priority=6))
    engine.add_request(EmbeddingRequest("urgent a", [[2] * 16], priority=0))
    assert {output.request_id for output in engine.step()} == {"a", "urgent a"}


@pytest.mark.parametrize("pooling", ["last_token", "mean"])
def test_a_failure_ends_its_request_alone_and_leaves_no_bad_kv(tmp_path: Path, pooling: str) -> None:
    write_pooling(make_checkpoint(tmp_path), "mean" if pooling == "mean" else "last_token")
    engine = load_engine(tmp_path, {"engine.max_num_batched_tokens": "16", "engine.max_num_seqs": "8"})
    weights = engine.model.embed_tokens.tensor
    kept = weights[200].clone()
    weights[200] = torch.nan
    bad, good = [1] * 20 + [200] + [2] * 20, [1] * 40
    outputs = run_all(engine, [EmbeddingRequest("bad", [good, bad, [5]]), EmbeddingRequest("good", [good])])
    assert isinstance(outputs["bad"].error, NonFiniteLogits)
    assert outputs["bad"].embeddings == ()
    assert outputs["good"].error is None
    weights[200] = kept
    assert run_all(engine, [EmbeddingRequest("again", [bad])])["again"].error is None


def test_equals_of_a_failed_request_are_tried_again_without_it(engine: OpenEngine) -> None:
    weights = engine.model.embed_tokens.tensor
    kept = weights[7].clone()
    weights[7] = torch.nan
    for name in "ab":
        engine.add_request(EmbeddingRequest(name, [[7]]))
    (first,) = engine.step()
    assert (first.request_id, type(first.error)) == ("a", NonFiniteLogits)
    weights[7] = kept
    (second,) = engine.step()
    assert (second.request_id, second.error) == ("b", None)


@pytest.mark.parametrize("dimensions", [1, 10, 64])
def test_a_matryoshka_model_gives_shorter_vectors_of_length_one(
    engine: Engine, checkpoint: Path, dimensions: int
) -> None:
    output = run_all(engine, [EmbeddingRequest("a", INPUTS, dimensions=dimensions)])["a"]
    reference = ReferenceEmbedder(checkpoint, "last_token")
    for token_ids, found in zip(INPUTS, output.embeddings, strict=True):
        expected = reference.embed(token_ids, dimensions)
        torch.testing.assert_close(torch.tensor(list(found)), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (EmbeddingRequest("a", INPUTS, dimensions=65), "dimensions"),
        (EmbeddingRequest("a", []), "input"),
        (EmbeddingRequest("a", [[]]), "input"),
        (EmbeddingRequest("a", [[1], []]), "input[1]"),
        (EmbeddingRequest("a", [[1], [320]]), "input[1]"),
        (EmbeddingRequest("__millrace", [[1]]), "request_id"),
    ],
)
def test_what_can_never_be_embedded_is_refused_by_name(engine: Engine, request_: EmbeddingRequest, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        engine.add_request(request_)
    assert caught.value.param == param
    assert not engine.has_unfinished()


def test_an_id_is_taken_whichever_kind_of_request_has_it(engine: Engine) -> None:
    engine.add_request(EmbeddingRequest("a", INPUTS))
    engine.add_request(greedy_request("b", [1], 4))
    for request in (greedy_request("a", [1]), EmbeddingRequest("b", INPUTS), EmbeddingRequest("a", INPUTS)):
        with pytest.raises(InvalidRequest, match="is taken"):
            engine.add_request(request)


def test_an_input_may_fill_the_whole_context_and_no_more(checkpoint: Path) -> None:
    engine = load_engine(checkpoint, {"engine.max_model_len": "48"})
    assert run_all(engine, [EmbeddingRequest("a", [[1] * 48])])["a"].error is None
    with pytest.raises(PromptTooLong):
        engine.add_request(EmbeddingRequest("a", [[1] * 49]))


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


def test_a_vector_is_cut_to_its_request_before_it_is_scaled() -> None:
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
def test_a_last_row_not_finite_fails_its_sequence_and_no_other(bad: float, num_tokens: int) -> None:
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
