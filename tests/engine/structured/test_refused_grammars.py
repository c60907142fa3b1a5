"""A grammar that cannot be compiled, or costs too much, fails its request; whatever runs beside it goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.errors import GrammarFailed, InvalidRequest
from engine.request import RequestOutput
from engine.structured.grammar import Grammar
from engine.structured.matcher import GrammarMatcher
from tests.support.engines import load_engine, run_all
from tests.support.grammars import DEEP_SCHEMA, POINT, SLOW_SCHEMA, held_request, schema_grammar

MATE = "mate"


@pytest.fixture(scope="module")
def strict(tiny_model: Path) -> Iterator[Engine]:
    limits = {"compile_timeout_s": "0.5", "max_grammar_bytes": "100000"}
    engine = load_engine(tiny_model, {f"engine.structured_output.{name}": value for name, value in limits.items()})
    yield engine
    engine.close()


def _beside_a_mate(engine: Engine, grammar: Grammar) -> RequestOutput:
    """The output of a request with this grammar; one beside it must end as it does alone."""
    mate = held_request(MATE, schema_grammar(POINT))
    alone = run_all(engine, [mate])[MATE]
    outputs = run_all(engine, [held_request("bad", grammar), mate])
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
    output = run_all(engine, [held_request("bad", grammar)])["bad"]
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
    assert "not compiled within 0.5 s" in str(output.error)


def test_a_grammar_that_overflows_the_stack_takes_nobody_along(strict: Engine) -> None:
    output = _beside_a_mate(strict, schema_grammar(DEEP_SCHEMA, "guided_json"))
    assert isinstance(output.error, InvalidRequest)
    assert (output.error.code, output.error.param) == ("grammar_too_complex", "guided_json")
    assert run_all(strict, [held_request("next", Grammar("regex", "a new one"))])["next"].error is None


def test_others_generate_while_a_grammar_is_compiled(strict: Engine) -> None:
    free = held_request("free", None, max_tokens=3)
    strict.add_request(held_request("slow", schema_grammar({"type": "integer", "multipleOf": 99_999_787})))
    strict.add_request(free)
    ended = [output.request_id for _ in range(400) for output in strict.step()]
    assert ended[0] == "free"
    while strict.has_unfinished():
        strict.step()


@pytest.mark.parametrize("seed", [1, 2], ids=["an equal request", "other draws"])
def test_a_request_that_shares_a_refused_grammar_is_told_of_its_own_parameter(engine: Engine, seed: int) -> None:
    requests = [
        held_request("a", Grammar("regex", "(a|", "guided_regex")),
        held_request("b", Grammar("regex", "(a|", "guided_regex")),
        held_request("c", Grammar("regex", "(a|", "structured_outputs"), seed=seed),
    ]
    outputs = run_all(engine, requests)
    errors = {name: output.error for name, output in outputs.items()}
    params = {name: error.param for name, error in errors.items() if isinstance(error, InvalidRequest)}
    assert params == {"a": "guided_regex", "b": "guided_regex", "c": "structured_outputs"}


def test_equals_of_a_refused_request_are_refused_with_it(engine: Engine) -> None:
    for name in "abc":
        engine.add_request(held_request(name, Grammar("regex", "(b|")))
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
    mate = held_request(MATE, schema_grammar(POINT))
    whole = run_all(engine, [mate])[MATE]
    outputs = run_all(engine, [held_request("bad", Grammar("regex", "[aq]{30}")), mate])
    assert isinstance(outputs["bad"].error, GrammarFailed)
    assert outputs["bad"].error.code == "grammar_failed"
    assert outputs[MATE].completions == whole.completions


@pytest.mark.usefixtures("q_does_not_fit")
def test_what_fails_for_each_of_some_equals_is_generated_once(engine: Engine) -> None:
    def work(names: str) -> int:
        before = engine.stats().generated_tokens
        outputs = run_all(engine, [held_request(name, Grammar("regex", "[aq]{30}")) for name in names])
        assert [type(outputs[name].error) for name in names] == [GrammarFailed] * len(names)
        return engine.stats().generated_tokens - before

    assert work("abc") == work("a")


def test_an_engine_that_was_closed_compiles_again(strict: Engine) -> None:
    strict.close()
    assert json.loads(run_all(strict, [held_request("r", schema_grammar(POINT))])["r"].completions[0].text)
