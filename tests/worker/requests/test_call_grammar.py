"""Grammars of tool calls, tried token by token on the compiled grammar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from engine.errors import InvalidRequest
from engine.request import Request
from engine.structured.compiler import ModelVocabulary
from engine.structured.grammar import Grammar
from engine.structured.trial import compile_matcher, definition
from tests.support.fake_engine import (
    HERMES_TOKENS,
    LLAMA3_TOKENS,
    QWEN3_TOKENS,
    chat_model,
    served_model,
    template_source,
)
from tests.support.request_lines import build_request, chat_line, parse
from worker.requests.chat_prompts import ChatPrompts

CITY = {
    "$defs": {"City": {"enum": ["Rome", "Oslo"]}},
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {**CITY, "required": ["city"], "additionalProperties": False}},
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
NAMED = {"type": "function", "function": {"name": "weather"}}

ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
PARIS = ROME.replace("Rome", "Paris")
NOW = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
BARE_ROME = '{"name": "weather", "parameters": {"city": "Rome"}}'
BARE_PARIS = BARE_ROME.replace("Rome", "Paris")
THOUGHT = "<think>\nRome { or Oslo\n</think>\n\n"

SHAPES = [
    ({"response_format": {"type": "json_object"}}, '{"a": 1}', "[1]"),
    ({"guided_json": {"type": "integer"}}, "12", '"12"'),
    ({"guided_choice": ["yes/no", 'a "b"']}, 'a "b"', "yes"),
    ({"guided_choice": [f"entry {i}" for i in range(2500)]}, "entry 24", "entry 2500"),
    ({"guided_regex": "a/b\\/\n[0-9]+"}, "a/b/\n12", "a/b"),
    ({"guided_regex": "a\\\nb"}, "a\nb", "a\\nb"),
]


class Model:
    """A model's request builder, and what its grammars let through."""

    def __init__(self, path: Path, template: str, tokens: dict[str, bool], **formats: Any) -> None:
        self.tokenizer = chat_model(path, template, tokens)
        self.builder = served_model(self.tokenizer, **formats).requests
        vocabulary = ModelVocabulary(
            self.tokenizer, self.tokenizer.vocab_size, [self.tokenizer.encode("<|im_end|>")[0]]
        )
        self._vocabulary = LLTokenizer(TokenizerWrapper(vocabulary))

    def grammar(self, **parameters: object) -> Grammar | None:
        request = build_request(self.builder, parse(chat_line(**parameters)))
        assert isinstance(request, Request)
        return request.params.grammar

    def matcher(self, **parameters: object) -> LLMatcher | None:
        grammar = self.grammar(**parameters)
        return None if grammar is None else compile_matcher(self._vocabulary, definition(grammar))[0]

    def takes(self, text: str, **parameters: object) -> bool:
        """Whether `text` may be the whole answer."""
        matcher = self.matcher(**parameters)
        assert matcher is not None
        token_ids = self.tokenizer.encode(text)
        return (
            matcher.validate_tokens(token_ids) == len(token_ids)
            and matcher.consume_tokens(token_ids)
            and matcher.is_accepting()
        )

    def refusal(self, **parameters: object) -> InvalidRequest:
        with pytest.raises(InvalidRequest) as raised:
            self.matcher(**parameters)
        return raised.value


@pytest.fixture(scope="module", params=["plain marks, special tag", "special marks", "no tokens of their own"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Model]:
    """One whose calls stand between marks, and one whose calls are bare JSON, perhaps behind a tag."""
    tokens = {
        "plain marks, special tag": (QWEN3_TOKENS, LLAMA3_TOKENS),
        "special marks": (HERMES_TOKENS, LLAMA3_TOKENS),
        "no tokens of their own": ({}, {}),
    }
    marked, bare = tokens[request.param]
    return (
        Model(tmp_path_factory.mktemp("marked"), template_source("marked_calls"), marked),
        Model(tmp_path_factory.mktemp("bare"), template_source("bare_calls"), bare),
    )


@pytest.fixture
def qwen3(models: tuple[Model, Model]) -> Model:
    return models[0]


@pytest.fixture
def llama3(models: tuple[Model, Model]) -> Model:
    return models[1]


def test_tools_that_may_be_called_hold_to_nothing(qwen3: Model, llama3: Model) -> None:
    for model in (qwen3, llama3):
        assert model.matcher(tools=[WEATHER, TIME]) is None
        assert model.matcher(tools=[STRICT], tool_choice="none") is None
        assert model.matcher() is None


def test_a_required_answer_is_calls_of_any_function(qwen3: Model) -> None:
    required = {"tools": [WEATHER, TIME], "tool_choice": "required"}

    for answer in (ROME, NOW, THOUGHT + ROME, f"{ROME}\n{NOW}"):
        assert qwen3.takes(answer, **required), answer
    for answer in ("", "Sunny.", PARIS, THOUGHT, THOUGHT + "Sunny.", ROME + "Sunny.", NOW.replace("{}", '{"a": 1}')):
        assert not qwen3.takes(answer, **required), answer
    assert not qwen3.takes(f"{ROME}\n{NOW}", **required, parallel_tool_calls=False)


def test_a_named_function_is_called_once(qwen3: Model, llama3: Model) -> None:
    named = {"tools": [TIME, WEATHER], "tool_choice": NAMED}

    assert qwen3.takes(ROME, **named)
    assert not qwen3.takes(NOW, **named)
    assert not qwen3.takes(f"{ROME}\n{ROME}", **named)
    assert llama3.takes(BARE_ROME, **named)
    assert llama3.takes("<|python_tag|>" + BARE_ROME, **named)
    for answer in (BARE_PARIS, "Sunny.", '{"name": "time", "parameters": {}}'):
        assert not llama3.takes(answer, **named), answer


def test_strict_functions_keep_to_their_schema_when_they_are_called(qwen3: Model, llama3: Model) -> None:
    offered = {"tools": [STRICT, TIME]}

    for answer in ("", "Sunny.", ROME, f"I look.\n{ROME}\n{NOW} So.", THOUGHT + ROME, NOW.replace("{}", '{"a": 1}')):
        assert qwen3.takes(answer, **offered), answer
    for answer in (PARIS, f"I look. {PARIS}", f"{ROME}{PARIS}", ROME[:-20]):
        assert not qwen3.takes(answer, **offered), answer
    for answer in ("", "Sunny.", " so {", BARE_ROME, "<|python_tag|>" + BARE_ROME):
        assert llama3.takes(answer, **offered), answer
    assert not llama3.takes(BARE_PARIS, **offered)


def test_one_call_at_a_time_is_one_strict_call(qwen3: Model) -> None:
    assert qwen3.takes(f"So {ROME} then", tools=[STRICT], parallel_tool_calls=False)
    assert not qwen3.takes(ROME + ROME, tools=[STRICT], parallel_tool_calls=False)


@pytest.mark.parametrize(("shape", "good", "bad"), SHAPES)
def test_an_answer_of_a_given_form_may_be_calls_or_begin_with_reasoning(
    qwen3: Model, llama3: Model, shape: dict[str, object], good: str, bad: str
) -> None:
    for parameters in (shape, {**shape, "tools": [WEATHER]}):
        assert qwen3.takes(good, **parameters)
        assert qwen3.takes(THOUGHT + good, **parameters)
        assert llama3.takes(good, **parameters)
        assert not qwen3.takes(bad, **parameters)
        assert not llama3.takes(bad, **parameters)
    assert qwen3.takes(ROME, **shape, tools=[STRICT])
    assert llama3.takes("<|python_tag|>" + BARE_ROME, **shape, tools=[STRICT])
    assert not qwen3.takes(ROME, **shape)
    assert not qwen3.takes(PARIS, **shape, tools=[STRICT])


def test_where_the_prompt_begins_the_reasoning_the_answer_ends_it(tmp_path: Path) -> None:
    model = Model(tmp_path, template_source("parts"), QWEN3_TOKENS, tool_call_format="qwen3")
    shape = {"response_format": {"type": "json_object"}}

    assert model.takes('hm\n</think>\n\n{"a": 1}', **shape)
    assert model.takes(f"hm</think>{ROME}", tools=[WEATHER], tool_choice="required")
    assert not model.takes('{"a": 1}', **shape)
    assert "grammar of its own" in str(model.refusal(guided_grammar='start: "a"'))


def test_a_grammar_of_ones_own_stands_alone(qwen3: Model) -> None:
    assert qwen3.takes("a", guided_grammar='start: "a"')
    error = qwen3.refusal(guided_grammar='start: "a"', tools=[WEATHER])
    assert (error.param, "grammar of its own" in str(error)) == ("guided_grammar", True)


def test_what_cannot_be_held_to_is_refused_by_name(qwen3: Model, tmp_path: Path) -> None:
    untold = Model(tmp_path / "untold", template_source("marked_calls"), {}, tool_call_format="none")
    bad = {"type": "function", "function": {"name": "f", "parameters": {"minProperties": 3}}}

    assert untold.refusal(tools=[WEATHER], tool_choice="required").param == "tool_choice"
    assert untold.refusal(tools=[STRICT]).param == "tools"
    assert untold.takes("{}", tools=[WEATHER], response_format={"type": "json_object"})
    both = {"tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}}
    assert "beside response_format" in str(qwen3.refusal(**both))
    assert qwen3.refusal(tools=[TIME, bad], tool_choice="required").param == "tools[1].function.parameters"


def test_nothing_in_a_schema_decides_how_it_is_read(qwen3: Model) -> None:
    loose = {"x-guidance": {"lenient": True, "whitespace_flexible": False}, "description": "start: ::= \n%json", **CITY}
    tool = {"type": "function", "function": {"name": "weather", "parameters": json.loads(json.dumps(loose))}}

    assert qwen3.takes(ROME, tools=[tool], tool_choice="required")
    assert qwen3.takes(ROME.replace('": "Rome', '":"Rome'), tools=[tool], tool_choice="required")


def test_a_grammar_bears_the_name_of_the_parameter_that_asked_for_it(qwen3: Model) -> None:
    form: dict[str, object] = {"response_format": {"type": "json_object"}}

    def param(**parameters: object) -> str:
        grammar = qwen3.grammar(**parameters)
        assert grammar is not None
        return grammar.param

    assert param(**form) == "response_format"
    assert param(**form, tools=[WEATHER]) == "response_format"
    assert param(**form, tools=[STRICT]) == "response_format"
    assert param(tools=[STRICT]) == "tools"
    assert param(tools=[STRICT], tool_choice="required") == "tool_choice"


def test_a_line_that_is_held_to_nothing_does_not_ask_the_template(
    qwen3: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChatPrompts, "opens_reasoning", lambda *_: pytest.fail("asked"))

    assert qwen3.grammar(tools=[WEATHER, TIME]) is None
    assert qwen3.grammar() is None


MISTRAL_TOKENS = dict.fromkeys(("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), True)
LISTED_ROME, LISTED_NOW = '{"name": "weather", "arguments": {"city": "Rome"}}', '{"name": "time", "arguments": {}}'
XML_ROME = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
XML_NOW = "<tool_call>\n<function=time>\n</function>\n</tool_call>"

# Format -> (tokens, a call of weather with Rome, one of time, both).
OTHERS: dict[str, tuple[dict[str, bool], str, str, str]] = {
    "mistral": (
        MISTRAL_TOKENS,
        f"[TOOL_CALLS][{LISTED_ROME}]",
        f"[TOOL_CALLS] [{LISTED_NOW}]",
        f"[TOOL_CALLS][{LISTED_ROME}, {LISTED_NOW}]",
    ),
    "mistral_v11": (
        MISTRAL_TOKENS,
        '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}',
        "[TOOL_CALLS]time[ARGS]{}",
        '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]time[ARGS]{}',
    ),
    "granite": (
        {"<|tool_call|>": False},
        f"<|tool_call|>[{LISTED_ROME}]",
        f"<|tool_call|>[{LISTED_NOW}]",
        f"<|tool_call|>[{LISTED_ROME}, {LISTED_NOW}]",
    ),
    "pythonic": (
        LLAMA3_TOKENS,
        '[weather(city="Rome")]',
        "[time()]",
        '[weather(city="Rome"), time()]',
    ),
    "olmo3": (
        dict.fromkeys(("<function_calls>", "</function_calls>"), False),
        '<function_calls>weather(city="Rome")</function_calls>',
        "<function_calls>\ntime()\n</function_calls>",
        '<function_calls>weather(city="Rome")\ntime()</function_calls>',
    ),
    "qwen3_coder": (QWEN3_TOKENS, XML_ROME, XML_NOW, f"{XML_ROME}\n{XML_NOW}"),
}


@pytest.fixture(scope="module", params=OTHERS)
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, str, str, str]:
    tokens, rome, now, both = OTHERS[request.param]
    path = tmp_path_factory.mktemp(request.param)
    model = Model(
        path, template_source("marked_calls"), tokens, tool_call_format=request.param, reasoning_format="none"
    )
    return model, rome, now, both


def test_calls_of_other_formats_are_held_to(other: tuple[Model, str, str, str]) -> None:
    model, rome, now, both = other
    required = {"tools": [WEATHER, TIME], "tool_choice": "required"}
    for answer in (rome, now, both):
        assert model.takes(answer, **required), answer
    for answer in (
        "",
        "Sunny.",
        rome.replace("Rome", "Paris"),
        rome + "Sunny.",
        "Sunny." + rome,
        rome.replace("city", "c"),
    ):
        assert not model.takes(answer, **required), answer
    assert not model.takes(both, **required, parallel_tool_calls=False)
    named = {"tools": [TIME, WEATHER], "tool_choice": NAMED}
    assert model.takes(rome, **named)
    assert not model.takes(now, **named)
    assert not model.takes(both, **named)


def test_strict_functions_of_other_formats_are_called_or_not(other: tuple[Model, str, str, str]) -> None:
    model, rome, now, both = other
    strict = {"tools": [STRICT, TIME]}
    for answer in ("", "Sunny.", rome, now, both, f"So: {rome}", now.replace("{}", '{"a": [1]}')):
        assert model.takes(answer, **strict), answer
    assert not model.takes(rome.replace("Rome", "Paris"), **strict)


def test_a_form_beside_calls_of_other_formats(other: tuple[Model, str, str, str]) -> None:
    model, rome, _, _ = other
    shaped = {"tools": [WEATHER, TIME], "response_format": {"type": "json_object"}}
    assert model.takes(rome, **shaped)
    assert model.takes('{"a": 1}', **shaped)
    assert not model.takes("Sunny.", **shaped)


SCHEMA: dict[str, Any] = {
    "type": "object",
    "$defs": {"Unit": {"enum": ["C", "F"]}, "Text": {"type": "string"}},
    "properties": {
        "note": {"anyOf": [{"$ref": "#/$defs/Text"}, {"type": "null"}]},
        "days": {"type": "integer", "minimum": 1},
        "unit": {"$ref": "#/$defs/Unit"},
        "places": {"type": "array", "items": {"$ref": "#/$defs/Unit"}},
    },
    "required": ["days"],
}


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("coder")
    template = template_source("marked_calls")
    return Model(path, template, {}, tool_call_format="qwen3_coder", reasoning_format="none")


def _held(**schema: object) -> dict[str, object]:
    function = {"name": "f", "parameters": {**SCHEMA, **schema}}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


def _xml(**values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"


def test_arguments_in_xml_keep_to_their_schemas(coder: Model) -> None:
    for taken in (_xml(days="2"), _xml(note="two\nlines <b>", days="2", unit="F"), _xml(days="1", places='["C", "F"]')):
        assert coder.takes(taken, **_held()), taken
    for refused in (_xml(), _xml(days="0"), _xml(days="two"), _xml(days="1", unit="K"), _xml(days="1", places='["K"]')):
        assert not coder.takes(refused, **_held()), refused
    assert not coder.takes(_xml(days="1", note="x"), **_held())  # in their order alone


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"type": "string", "pattern": "a+"}, "held to pattern"),
        ({"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}, "held to maxLength"),
        ({"enum": ["a", 1]}, "held to enum"),
        ({}, "has no type"),
        ({"$ref": "#/$defs/Elsewhere"}, "has no type"),
    ],
)
def test_what_xml_cannot_be_held_to_is_refused(coder: Model, given: dict[str, object], why: str) -> None:
    error = coder.refusal(**_held(properties={"days": given}))
    assert error.param == "tools[0].function.parameters"
    assert why in str(error)


def test_arguments_in_xml_need_names(coder: Model) -> None:
    assert "an object with properties" in str(coder.refusal(**_held(required=["days", "hours"])))


@pytest.fixture(scope="module")
def pythonic(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("pythonic")
    return Model(path, template_source("marked_calls"), {}, tool_call_format="pythonic", reasoning_format="none")


def test_arguments_of_pythons_calls_keep_to_their_schemas(pythonic: Model) -> None:
    properties = {**SCHEMA["properties"], "exact": {"type": "boolean"}}
    for taken in (
        "days=2",
        'note=null, days=12, unit="F", places=["C", "F"], exact=True',
        'note="a, b=(", days=1, exact=False',
    ):
        assert pythonic.takes(f"[f({taken})]", **_held(properties=properties)), taken
    for refused in (
        "",
        "days=0",
        'days="2"',
        "days=1, ",
        ", days=1",
        'days=1unit="F"',
        'days=1, unit="K"',
        "days=1, exact=1",
        'days=1, note="x"',
        "days=1, more=2",
    ):
        assert not pythonic.takes(f"[f({refused})]", **_held(properties=properties)), refused


def test_arguments_of_pythons_calls_without_a_schema_are_any(pythonic: Model) -> None:
    strict = {"tools": [STRICT, TIME]}
    for taken in ('a=1, b="x", c=[{"d": null}], e=True, f=None', ""):
        assert pythonic.takes(f"[time({taken})]", **strict), taken
    for refused in ("1", "a=", "a=b", "a=1 b=2"):
        assert not pythonic.takes(f"[time({refused})]", **strict), refused
    error = pythonic.refusal(**_held(properties={"days": {"type": "integer"}, "a b": {"type": "integer"}}))
    assert "'a b' is no name" in str(error)
