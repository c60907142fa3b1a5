"""Requests that wait for a grammar keep it in the queue; those that were aborted do not."""

from __future__ import annotations

import threading

import pytest

from engine.engine import Engine
from engine.structured.grammar import Grammar
from engine.structured.grammar_trials import GrammarTrials
from tests.support.grammars import held_request


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
