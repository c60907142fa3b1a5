"""Embeddings of decoders against transformers in float32, for each way an input can be run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.embedding_config import Pooling
from engine.engine import Engine
from engine.errors import InvalidRequest
from engine.request import EmbeddingRequest, RequestOutput
from tests.support.engines import greedy_request, load_engine, run_all, tokens_of
from tests.support.tiny_checkpoint import ReferenceEmbedder, make_body_checkpoint, make_checkpoint, write_pooling

TOLERANCE = 1e-4  # wanted; observed: below 1e-6
LENGTHS = (1, 5, 16, 33)
VARIANTS: dict[str, tuple[str, Pooling | None, dict[str, Any]]] = {
    "qwen3, nothing said": ("causal", None, {}),
    "qwen3, last token": ("causal", "last_token", {"tie_word_embeddings": True}),
    "qwen3, mean": ("causal", "mean", {"num_attention_heads": 8}),
    "qwen3 body, last token": ("body", "last_token", {"tie_word_embeddings": True}),
    "qwen3 body, cls": ("body", "cls", {}),
    "llama body, mean": ("llama", "mean", {}),
}


class Case:
    """A checkpoint, inputs of which some share prefixes, and transformers' answers."""

    def __init__(self, path: Path, kind: str, pooling: Pooling | None, options: dict[str, Any]) -> None:
        make = make_checkpoint if kind == "causal" else make_body_checkpoint
        self.path = make(path, "llama" if kind == "llama" else "qwen3", **options)
        if pooling is not None:
            write_pooling(path, pooling)
        self.pooling: Pooling = pooling or "last_token"
        rng = random.Random(7)
        shared = [rng.randrange(256) for _ in range(48)]
        self.inputs: list[list[int]] = []
        for number in range(12):
            own = [rng.randrange(256) for _ in range(LENGTHS[number % len(LENGTHS)])]
            self.inputs.append(shared + own if number % 3 == 0 else own)
        reference = ReferenceEmbedder(path, self.pooling)
        self.expected = [reference.embed(token_ids) for token_ids in self.inputs]

    def engine(self, **overrides: str) -> Engine:
        return load_engine(self.path, {f"engine.{key.replace('__', '.')}": v for key, v in overrides.items()})

    def check(self, engine: Engine) -> None:
        """Half of the inputs as requests of their own, the others as one request."""
        half = len(self.inputs) // 2
        requests = [EmbeddingRequest(f"e{index}", [self.inputs[index]]) for index in range(half)]
        requests.append(EmbeddingRequest("many", self.inputs[half:]))
        outputs = run_all(engine, requests)
        for index in range(half):
            assert_close(outputs[f"e{index}"], [self.expected[index]])
        assert_close(outputs["many"], self.expected[half:])


def assert_close(output: RequestOutput, expected: Sequence[torch.Tensor]) -> None:
    assert output.error is None, output.error
    assert len(output.embeddings) == len(expected)
    for found, wanted in zip(output.embeddings, expected, strict=True):
        torch.testing.assert_close(torch.tensor(list(found)), wanted, atol=TOLERANCE, rtol=0)


@pytest.fixture(scope="module", params=list(VARIANTS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("embedder"), *VARIANTS[request.param])


def test_together(case: Case) -> None:
    case.check(case.engine())


def test_one_after_the_other(case: Case) -> None:
    engine = case.engine()
    for index, token_ids in enumerate(case.inputs[:6]):
        assert_close(run_all(engine, [EmbeddingRequest("one", [token_ids])])["one"], [case.expected[index]])


def test_in_chunks_of_seven(case: Case) -> None:
    case.check(case.engine(max_num_batched_tokens="7", max_num_seqs="7"))


def test_preempted_and_recomputed(case: Case) -> None:
    """A small pool: generating requests grow and preempt embeddings between their chunks."""
    engine = case.engine(kv_cache__num_blocks="16", max_num_batched_tokens="16", max_num_seqs="8")
    generating = [greedy_request(f"g{index}", [index], 40) for index in range(6)] if engine.generates else []
    for request in generating:
        engine.add_request(request)
    case.check(engine)
    assert bool(engine.stats().num_preemptions) == bool(generating)


def test_again_over_the_prefix_cache(case: Case) -> None:
    engine = case.engine()
    case.check(engine)
    before = engine.stats().cached_tokens
    case.check(engine)
    hits = engine.stats().cached_tokens - before
    expected = sum((len(token_ids) - 1) // 16 * 16 for token_ids in case.inputs)
    assert hits == (expected if case.pooling == "last_token" else 0)


def test_requests_that_generate_beside_it_get_the_tokens_they_get_alone(tmp_path: Path) -> None:
    case = Case(tmp_path, "causal", "mean", {})
    generating = [greedy_request(f"g{index}", token_ids, 12) for index, token_ids in enumerate(case.inputs[:8])]
    alone = run_all(case.engine(), generating)
    engine = case.engine(max_num_batched_tokens="32", max_num_seqs="32")
    for request in generating:
        engine.add_request(request)
    embeddings = [EmbeddingRequest(f"e{index}", [token_ids]) for index, token_ids in enumerate(case.inputs)]
    outputs = run_all(engine, embeddings)
    for index, expected in enumerate(case.expected):
        assert_close(outputs[f"e{index}"], [expected])
    for name, output in alone.items():
        assert tokens_of(outputs[name]) == tokens_of(output)


def test_the_prefix_cache_of_a_generating_request_serves_an_embedding(tmp_path: Path) -> None:
    case = Case(tmp_path, "causal", None, {})
    engine, longest = case.engine(), 9
    prompt = case.inputs[longest]
    run_all(engine, [greedy_request("g", prompt, 4)])
    output = run_all(engine, [EmbeddingRequest("e", [prompt])])["e"]
    assert output.num_cached_tokens == (len(prompt) - 1) // 16 * 16 > 0
    assert_close(output, [case.expected[longest]])


def test_bit_for_bit_with_deterministic_kernels(tmp_path: Path) -> None:
    case = Case(tmp_path, "causal", "mean", {})
    found = []
    for tokens in ("7", "512"):
        engine = case.engine(deterministic="true", max_num_batched_tokens=tokens, max_num_seqs="7")
        found.append(run_all(engine, [EmbeddingRequest("e", case.inputs)])["e"].embeddings)
    assert found[0] == found[1]


def test_only_models_for_embeddings_are_held_against_each_other(tmp_path: Path) -> None:
    generating = make_checkpoint(tmp_path / "generating")
    assert not load_engine(generating).makes_comparable_embeddings
    write_pooling(generating, "last_token")
    engine = load_engine(generating)
    assert (engine.generates, engine.makes_comparable_embeddings) == (True, True)
    assert load_engine(make_body_checkpoint(tmp_path / "body")).makes_comparable_embeddings


def test_a_body_alone_generates_nothing(tmp_path: Path) -> None:
    engine = load_engine(make_body_checkpoint(tmp_path))
    assert not engine.generates
    with pytest.raises(InvalidRequest, match="no lm_head: it generates nothing") as caught:
        engine.add_request(greedy_request("g", [1, 2]))
    assert caught.value.code == "unsupported_endpoint"
