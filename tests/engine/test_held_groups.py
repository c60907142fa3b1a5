"""Requests that wait for a grammar keep it in the queue; those that were aborted do not."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from engine.engine import Engine
from engine.finish_reason import FinishReason
from engine.structured.grammar import Grammar
from engine.structured.grammar_trials import GrammarTrials
from tests.support.engines import load_engine
from tests.support.grammars import held_request
from tests.support.tiny_checkpoint import make_checkpoint


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = load_engine(make_checkpoint(tmp_path_factory.mktemp("held") / "tiny", "qwen3", initializer_range=0.6))
    yield engine
    engine.close()


def test_a_grammar_is_compiled_as_long_as_somebody_waits_for_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, definition = threading.Event(), threading.Event(), GrammarTrials.definition
    tried: list[str] = []

    def definition_later(self: GrammarTrials, grammar: Grammar) -> str:
        tried.append(grammar.text)
        begun.set()
        go_on.wait(10)
        return definition(self, grammar)

    monkeypatch.setattr(GrammarTrials, "definition", definition_later)
    for name, text, seed in [("first", "x1", 1), ("a", "x2", 1), ("b", "x2", 2), ("c", "x3", 1), ("d", "x4", 1)]:
        engine.add_request(held_request(name, Grammar("regex", text), seed=seed))
    assert begun.wait(10)
    assert engine.abort("a")
    assert engine.abort("c")
    engine.add_request(held_request("late", Grammar("regex", "x5")))
    go_on.set()
    assert _texts(engine) == {"first": "x1", "a": "", "b": "x2", "c": "", "d": "x4", "late": "x5"}
    assert tried == ["x1", "x2", "x4", "x5"]
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
    seed = next(seed for seed in range(50) if _lengths(engine, either, seed) == {1, 20})
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


def _lengths(engine: Engine, grammar: Grammar, seed: int) -> set[int]:
    engine.add_request(held_request("probe", grammar, seed=seed, n=2))
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    return {len(completion.text) for completion in outputs[0].completions}
