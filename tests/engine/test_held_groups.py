"""Requests that wait for a grammar keep it in the queue; those that were aborted do not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.request import FinishReason
from engine.structured.grammar import Grammar
from tests.support.engines import load_engine, run_all
from tests.support.grammars import held_request
from tests.support.held_trials import HeldTrials


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    engine = load_engine(tiny_model)
    yield engine
    engine.close()


def test_a_grammar_is_compiled_as_long_as_somebody_waits_for_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = HeldTrials(monkeypatch)
    for name, text, seed in [("first", "x1", 1), ("a", "x2", 1), ("b", "x2", 2), ("c", "x3", 1), ("d", "x4", 1)]:
        engine.add_request(held_request(name, Grammar("regex", text), seed=seed))
    trials.wait_begun()
    assert engine.abort("a")
    assert engine.abort("c")
    engine.add_request(held_request("late", Grammar("regex", "x5")))
    trials.go_on()
    assert _texts(engine) == {"first": "x1", "a": "", "b": "x2", "c": "", "d": "x4", "late": "x5"}
    assert trials.tried == ["x1", "x2", "x4", "x5"]
    engine.add_request(held_request("again", Grammar("regex", "x3")))
    assert _texts(engine) == {"again": "x3"}


def _texts(engine: Engine) -> dict[str, str]:
    texts: dict[str, str] = {}
    while engine.has_unfinished():
        texts |= {output.request_id: output.completions[0].text for output in engine.step()}
    return texts


def test_an_equal_that_is_aborted_keeps_the_end_its_grammar_gave_a_sequence(engine: Engine) -> None:
    # Two sequences of the same draws in each engine run: one that is over at once, one that goes on for long.
    either = Grammar("regex", "x|y{20}")
    seed = next(seed for seed, lengths in _lengths(engine, either, range(20)).items() if lengths == {1, 20})
    for name in ("runs", "leaves"):
        engine.add_request(held_request(name, either, seed=seed, n=2))
    while engine.stats().num_running + engine.stats().num_waiting != 1:  # until the first sequence is over
        engine.step()
    assert engine.abort("leaves")
    (left,) = [output for output in engine.step() if output.request_id == "leaves"]
    ended = {completion.text: completion.finish_reason for completion in left.completions}
    assert ended.pop("x") is FinishReason.STOP
    assert list(ended.values()) == [FinishReason.CANCELLED]
    assert "runs" in _texts(engine)


def _lengths(engine: Engine, grammar: Grammar, seeds: Iterable[int]) -> dict[int, set[int]]:
    outputs = run_all(engine, [held_request(str(seed), grammar, seed=seed, n=2) for seed in seeds])
    return {int(name): {len(completion.text) for completion in output.completions} for name, output in outputs.items()}
