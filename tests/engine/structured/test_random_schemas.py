"""Whatever a JSON schema says, what was completed under it says so too; and lines beside it do not notice."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from engine.engine import Engine
from engine.request import FinishReason, Request, RequestOutput
from tests.support.engines import load_engine, run_all
from tests.support.grammars import held_request, schema_grammar
from tests.support.json_schemas import Schema, random_schema

# Completed, of all: the others fill a string or a number up to max_tokens, as a model of random weights will.
MIN_COMPLETED = 0.7


def _held(schemas: Sequence[Schema], max_tokens: int) -> list[Request]:
    """A request a schema, every third of them greedy; the prompts differ."""
    return [
        held_request(
            f"held {number}",
            schema_grammar(schema),
            (number % 250, number // 250, *range(20)),
            max_tokens=max_tokens,
            seed=number,
            temperature=0.0 if number % 3 == 0 else 1.0,
        )
        for number, schema in enumerate(schemas)
    ]


def _free(count: int) -> list[Request]:
    """Requests without a grammar: greedy ones and seeded ones, with penalties, bias and truncation among them."""
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2},
        {"temperature": 1.0, "top_k": 20, "logit_bias": {7: 5.0}, "min_tokens": 5},
    ]
    return [
        held_request(f"free {n}", None, (n, *range(10, 25)), seed=n, **{"max_tokens": 40} | kinds[n % len(kinds)])
        for n in range(count)
    ]


def _with_logprobs(request: Request) -> Request:
    return replace(request, params=replace(request.params, logprobs=2))


def _interleaved(held: Sequence[Request], free: Sequence[Request]) -> list[Request]:
    places = [(number / len(group), request) for group in (held, free) for number, request in enumerate(group)]
    return [request for _, request in sorted(places, key=lambda pair: pair[0])]


def _assert_valid(schemas: Sequence[Schema], outputs: Mapping[str, RequestOutput]) -> None:
    completed = 0
    for number, schema in enumerate(schemas):
        output = outputs[f"held {number}"]
        assert output.error is None, (number, schema, output.error)
        (completion,) = output.completions
        if completion.finish_reason is FinishReason.STOP:
            completed += 1
            Draft202012Validator(schema).validate(json.loads(completion.text))
    assert completed >= MIN_COMPLETED * len(schemas), f"{completed} of {len(schemas)} completed"


def _assert_unnoticed(
    engine: Engine, schemas: Sequence[Schema], free: Sequence[Request], *, max_tokens: int = 300
) -> None:
    """Run schemas and free requests mixed, then the free ones alone: results valid, and equal to the byte."""
    mixed = run_all(engine, _interleaved(_held(schemas, max_tokens), free))
    _assert_valid(schemas, mixed)
    alone = run_all(engine, free)
    assert {name: output.completions for name, output in alone.items()} == {
        request.request_id: mixed[request.request_id].completions for request in free
    }


def test_completed_results_validate_and_lines_beside_them_are_as_without(tiny_model: Path) -> None:
    engine = load_engine(tiny_model)
    _assert_unnoticed(engine, [random_schema(seed) for seed in range(500, 528)], _free(16), max_tokens=120)
    engine.close()


@pytest.mark.structured
@pytest.mark.timeout(900)
def test_five_hundred_schemas(tiny_model: Path) -> None:
    engine = load_engine(tiny_model)
    _assert_unnoticed(engine, [random_schema(seed) for seed in range(500)], _free(200))
    engine.close()


@pytest.mark.structured
@pytest.mark.timeout(900)
def test_a_hundred_schemas_bit_for_bit_with_preemptions(tiny_model: Path) -> None:
    """Deterministic, in a pool too small for all: the free lines' log-probabilities have the same bits too."""
    engine = load_engine(tiny_model, {"engine.deterministic": "true", "engine.kv_cache.num_blocks": "120"})
    schemas = [random_schema(seed) for seed in range(1000, 1100)]
    _assert_unnoticed(engine, schemas, [_with_logprobs(request) for request in _free(50)])
    assert engine.stats().num_preemptions > 0
    engine.close()
