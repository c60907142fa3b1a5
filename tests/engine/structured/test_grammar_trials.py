"""The process that tries grammars is replaced whenever it ends, and takes nothing along."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.structured.grammar import Grammar
from engine.structured.grammar_trials import GrammarTrials
from tests.support.grammars import DEEP_SCHEMA, SLOW_SCHEMA, schema_grammar

GOOD = Grammar("regex", "a+")


@pytest.fixture
def trials() -> Iterator[GrammarTrials]:
    trials = GrammarTrials(timeout_s=1.0, max_bytes=1 << 29)
    yield trials
    trials.close()


def _children() -> set[int]:
    """Processes that this one started and has not waited for."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {int(pid) for task in tasks for pid in task.read_text().split()}


def test_a_process_that_died_while_it_waited_is_replaced(trials: GrammarTrials) -> None:
    before = _children()
    first = trials.definition(GOOD)
    (pid,) = _children() - before
    os.kill(pid, signal.SIGKILL)
    assert trials.definition(GOOD) == first


@pytest.mark.parametrize(
    ("schema", "error"), [(SLOW_SCHEMA, TimeoutError), (DEEP_SCHEMA, MemoryError), ({"type": "no"}, ValueError)]
)
def test_after_a_bad_grammar_a_good_one_is_tried(
    trials: GrammarTrials, schema: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        trials.definition(schema_grammar(schema))
    assert trials.definition(GOOD)


def test_nothing_is_left_running(trials: GrammarTrials) -> None:
    before = _children()
    trials.definition(GOOD)
    trials.close()
    assert _children() == before
    forgotten = GrammarTrials(timeout_s=1.0, max_bytes=1 << 29)
    forgotten.definition(GOOD)
    del forgotten
    assert _children() == before
