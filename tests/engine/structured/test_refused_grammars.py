"""A grammar that cannot be compiled, or costs too much, fails its request alone; each is tried in a process beside."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.errors import EngineUnavailable, GrammarFailed, InvalidRequest
from engine.request import RequestOutput
from engine.structured.grammar import Grammar
from engine.structured.matcher import GrammarMatcher
from engine.structured.trial import CHILD, GrammarTrials
from tests.support.engines import load_engine, run_all
from tests.support.grammars import DEEP_SCHEMA, POINT, SLOW_SCHEMA, grammar_request, schema_grammar
from tests.support.processes import wait_until

MATE = "mate"

GOOD = Grammar("regex", "a+")


@pytest.fixture(scope="module")
def strict(tiny_model: Path) -> Iterator[Engine]:
    limits = {"compile_timeout_s": "2", "max_grammar_bytes": "100000"}
    engine = load_engine(tiny_model, {f"engine.structured_output.{name}": value for name, value in limits.items()})
    yield engine
    engine.close()


def _beside_a_mate(engine: Engine, grammar: Grammar) -> RequestOutput:
    """The output of a request with this grammar; a request beside it must end as it does alone."""
    mate = grammar_request(MATE, schema_grammar(POINT))
    alone = run_all(engine, [mate])[MATE]
    outputs = run_all(engine, [grammar_request("bad", grammar), mate])
    assert outputs[MATE].completions == alone.completions
    assert alone.error is None
    return outputs["bad"]


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (schema_grammar({"type": "object", "not": {"required": ["a"]}}), "not"),
        (schema_grammar({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema_grammar({"type": "somewhat"}), "somewhat"),
        (schema_grammar({"$ref": "#/$defs/nowhere"}), "nowhere"),
        (schema_grammar({"$ref": "https://example.com/schema"}), "example.com"),
        (schema_grammar({"enum": []}), "Unsatisfiable"),
        (schema_grammar({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (schema_grammar({"type": "string", "format": "colour"}), "colour"),
        (schema_grammar({"type": "object", "minProperties": 3}), "minProperties"),
        (schema_grammar({"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}), "uniqueItems"),
        (Grammar("regex", "(a", "guided_regex"), "unclosed group"),
        (Grammar("regex", r"[^\x00-\x{10FFFF}]", "guided_regex"), ""),
        (Grammar("regex", "(" * 5000 + "a" + ")" * 5000, "guided_regex"), "nest"),
        (Grammar("lark", "start: nowhere", "guided_grammar"), "nowhere"),
        (Grammar("lark", "start: " + "(" * 5000 + '"a"' + ")" * 5000, "guided_grammar"), "nested"),
        (Grammar("lark", "root ::= (", "guided_grammar"), ""),
    ],
    ids=lambda value: value.text[:40] if isinstance(value, Grammar) else "",
)
def test_a_grammar_that_cannot_be_compiled_names_its_parameter(engine: Engine, grammar: Grammar, says: str) -> None:
    output = run_all(engine, [grammar_request("bad", grammar)])["bad"]
    assert isinstance(output.error, InvalidRequest)
    assert (output.error.code, output.error.param) == ("invalid_grammar", grammar.param)
    assert str(output.error).startswith(f"{grammar.param} cannot be compiled: ")
    assert says in str(output.error)
    assert len(str(output.error)) < 800
    assert output.completions == ()


def test_a_grammar_above_the_limit_names_both_sizes(strict: Engine) -> None:
    output = _beside_a_mate(strict, Grammar("regex", "é" * 60_000, "guided_regex"))
    assert isinstance(output.error, InvalidRequest)
    assert (output.error.code, output.error.param) == ("grammar_too_large", "guided_regex")
    assert "has 120000 bytes; accepted: at most 100000" in str(output.error)


def test_a_grammar_that_compiles_for_ever_is_given_up(strict: Engine) -> None:
    output = _beside_a_mate(strict, schema_grammar(SLOW_SCHEMA))
    assert isinstance(output.error, InvalidRequest)
    assert (output.error.code, output.error.param) == ("grammar_too_complex", "response_format")
    assert "not compiled within 2 s" in str(output.error)


def test_a_grammar_that_overflows_the_stack_takes_nobody_along(strict: Engine) -> None:
    output = _beside_a_mate(strict, schema_grammar(DEEP_SCHEMA, "guided_json"))
    assert isinstance(output.error, InvalidRequest)
    assert (output.error.code, output.error.param) == ("grammar_too_complex", "guided_json")
    assert run_all(strict, [grammar_request("next", Grammar("regex", "a new one"))])["next"].error is None


def test_others_generate_while_a_grammar_is_compiled(strict: Engine) -> None:
    free = grammar_request("free", None, max_tokens=3)
    strict.add_request(grammar_request("slow", schema_grammar({"type": "integer", "multipleOf": 99_999_787})))
    strict.add_request(free)
    ended = [output.request_id for _ in range(400) for output in strict.step()]
    assert ended[0] == "free"
    while strict.has_unfinished():
        strict.step()


@pytest.mark.parametrize("seed", [1, 2], ids=["an equal request", "other draws"])
def test_who_shares_a_refused_grammar_is_told_of_its_own_parameter(engine: Engine, seed: int) -> None:
    requests = [
        grammar_request("a", Grammar("regex", "(a|", "guided_regex")),
        grammar_request("b", Grammar("regex", "(a|", "guided_regex")),
        grammar_request("c", Grammar("regex", "(a|", "structured_outputs"), seed=seed),
    ]
    outputs = run_all(engine, requests)
    errors = {name: output.error for name, output in outputs.items()}
    params = {name: error.param for name, error in errors.items() if isinstance(error, InvalidRequest)}
    assert params == {"a": "guided_regex", "b": "guided_regex", "c": "structured_outputs"}


def test_equals_of_a_refused_request_are_refused_with_it(engine: Engine) -> None:
    for name in "abc":
        engine.add_request(grammar_request(name, Grammar("regex", "(b|")))
    ended: list[str] = []
    while not ended:
        ended = [output.request_id for output in engine.step() if isinstance(output.error, InvalidRequest)]
    assert ended == ["a", "b", "c"]
    assert not engine.has_unfinished()


@pytest.fixture
def q_does_not_fit(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matcher fails behind a "q"."""
    accept = GrammarMatcher.accept

    def accept_wrongly(self: GrammarMatcher, token_id: int) -> None:
        text = engine.tokenizer.token_text(token_id)
        accept(self, engine.tokenizer.encode("?")[0] if text == "q" else token_id)

    monkeypatch.setattr(GrammarMatcher, "accept", accept_wrongly)


@pytest.mark.usefixtures("q_does_not_fit")
def test_a_matcher_that_fails_on_the_way_fails_its_request_alone(engine: Engine) -> None:
    mate = grammar_request(MATE, schema_grammar(POINT))
    whole = run_all(engine, [mate])[MATE]
    outputs = run_all(engine, [grammar_request("bad", Grammar("regex", "[aq]{30}")), mate])
    assert isinstance(outputs["bad"].error, GrammarFailed)
    assert outputs["bad"].error.code == "grammar_failed"
    assert outputs[MATE].completions == whole.completions


@pytest.mark.usefixtures("q_does_not_fit")
def test_what_fails_for_each_of_some_equals_is_generated_once(engine: Engine) -> None:
    def work(names: str) -> int:
        before = engine.stats().generated_tokens
        outputs = run_all(engine, [grammar_request(name, Grammar("regex", "[aq]{30}")) for name in names])
        assert [type(outputs[name].error) for name in names] == [GrammarFailed] * len(names)
        return engine.stats().generated_tokens - before

    assert work("abc") == work("a")


def test_an_engine_that_was_closed_compiles_again(strict: Engine) -> None:
    strict.close()
    assert json.loads(run_all(strict, [grammar_request("r", schema_grammar(POINT))])["r"].completions[0].text)


@pytest.fixture
def trials() -> Iterator[GrammarTrials]:
    trials = GrammarTrials(timeout_s=2.0, max_bytes=1 << 29)
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
    forgotten = GrammarTrials(timeout_s=2.0, max_bytes=1 << 29)
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
        wait_until(trials._in_use.locked)
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
