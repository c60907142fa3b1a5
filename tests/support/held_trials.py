"""Grammars whose trial waits until a test lets it go on."""

from __future__ import annotations

import threading

import pytest

from engine.structured.grammar import Grammar
from engine.structured.trial import GrammarTrials

TIMEOUT_S = 10.0


class HeldTrials:
    """Every trial of a grammar waits for `go_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tried: list[str] = []  # texts of the grammars, in the order of their trials
        self._has_begun = threading.Event()
        self._goes_on = threading.Event()
        definition = GrammarTrials.definition

        def definition_later(trials: GrammarTrials, grammar: Grammar) -> str:
            self.tried.append(grammar.text)
            self._has_begun.set()
            self._goes_on.wait(TIMEOUT_S)
            return definition(trials, grammar)

        monkeypatch.setattr(GrammarTrials, "definition", definition_later)

    def wait_begun(self) -> None:
        """Return once the first trial has begun."""
        assert self._has_begun.wait(TIMEOUT_S)

    def go_on(self) -> None:
        """Let all of them go on, now and later."""
        self._goes_on.set()
