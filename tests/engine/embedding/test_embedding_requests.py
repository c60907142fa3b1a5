"""What becomes of embedding requests that are equal, aborted, refused or fail."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.engine import Engine
from engine.errors import InvalidRequest, NonFiniteLogits, PromptTooLong
from engine.request import EmbeddingRequest
from tests.support.engines import greedy_request, load_engine, run_all
from tests.support.tiny_checkpoint import make_checkpoint
from tests.support.tiny_embedders import ReferenceEmbedder, write_pooling

INPUTS = [list(range(40)), [7, 8, 9]]


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
    assert engine.checkpoint("a") is None  # there is no half of a vector that another worker could go on from
    assert engine.due_checkpoints() == {}
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
    weights = engine._executor.model.embed_tokens
    kept = weights[200].clone()
    weights[200] = torch.nan
    bad, good = [1] * 20 + [200] + [2] * 20, [1] * 40
    outputs = run_all(engine, [EmbeddingRequest("bad", [good, bad, [5]]), EmbeddingRequest("good", [good])])
    assert isinstance(outputs["bad"].error, NonFiniteLogits)
    assert outputs["bad"].embeddings == ()
    assert outputs["good"].error is None
    weights[200] = kept
    assert run_all(engine, [EmbeddingRequest("again", [bad])])["again"].error is None


def test_equals_of_a_failed_request_are_tried_again_without_it(engine: Engine) -> None:
    weights = engine._executor.model.embed_tokens
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
