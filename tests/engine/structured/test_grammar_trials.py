"""The process that tries grammars is replaced whenever it ends, and takes nothing along."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine.errors import EngineUnavailable
from engine.structured.grammar import Grammar
from engine.structured.trial import CHILD, GrammarTrials
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


def test_a_process_that_cannot_be_started_is_no_fault_of_the_grammar(
    trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    def popen(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", popen)
        with pytest.raises(EngineUnavailable, match=r"did not start: .*temporarily"):
            trials.definition(GOOD)
    assert trials.definition(GOOD)


def test_a_process_with_over_a_thousand_open_files_tries_grammars(trials: GrammarTrials) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
        while stack.enter_context(open(os.devnull)).fileno() < 1024:
            pass
        assert trials.definition(GOOD)


def test_a_grammar_that_is_being_tried_at_the_close_is_not_refused() -> None:
    trials = GrammarTrials(timeout_s=30.0, max_bytes=1 << 29)
    trials.definition(GOOD)
    before = _children()
    with ThreadPoolExecutor(1) as thread:
        tried = thread.submit(trials.definition, schema_grammar(SLOW_SCHEMA))
        time.sleep(0.3)
        trials.close()
        with pytest.raises(EngineUnavailable):
            tried.result(timeout=10)
    assert len(_children()) == len(before) - 1


def test_a_process_whose_parent_was_killed_ends_soon_after_the_timeout() -> None:
    command = [sys.executable, "-I", "-c", CHILD, str(1 << 29), "1", *(entry or os.getcwd() for entry in sys.path)]
    slow = schema_grammar(SLOW_SCHEMA)
    request = json.dumps((slow.kind, slow.text)).encode() + b"\n"
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as child:
        try:
            assert child.stdin is not None
            child.stdin.write(request)
            child.stdin.flush()
            assert child.wait(timeout=20) == -signal.SIGALRM
        finally:
            child.kill()
