"""Lines that set the form of their answers, and tool calls, by an engine with random weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai.types.chat import ChatCompletion

from engine.engine import Engine
from engine.text.tokenizer import Tokenizer
from settings import LimitSettings, ModelSettings
from tests.support.engines import load_engine
from tests.support.fake_engine import LLAMA3_TOKENS, QWEN3_TOKENS, chat_model, template_source
from tests.support.grammars import POINT, SLOW_SCHEMA
from tests.support.request_lines import chat_line, completion_line
from tests.support.tiny_checkpoint import make_checkpoint
from worker.offline import LineFeed, OfflineRun

FORMAT = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT, "strict": True}}
LIMITS = {"engine.structured_output.compile_timeout_s": "2", "engine.structured_output.max_grammar_bytes": "1000"}

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": CITY}}
TIME = {"type": "function", "function": {"name": "time"}}
SCHEMAS: dict[str, Any] = {"weather": CITY, "time": {"type": "object", "maxProperties": 0}}
YES_NO = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}
NAMED = {"type": "function", "function": {"name": "time"}}


def _run(model: Path, lines: list[bytes]) -> dict[str, Mapping[str, Any]]:
    records: list[Mapping[str, Any]] = []
    engine = load_engine(model, LIMITS)
    feed = LineFeed(lines, LimitSettings(), capacity=16, by_prefix=True)
    feed.start()
    OfflineRun(engine, ModelSettings(name="m"), window=16, write=records.append).run(feed, lambda: False, lambda: None)
    engine.close()
    return {record["custom_id"]: record["response"] for record in records}


def test_answers_have_the_form_asked_for_and_a_bad_form_fails_alone(tiny_model: Path) -> None:
    common: dict[str, Any] = {"max_tokens": 150, "seed": 3}
    choice, regex = ["the", "you"], "[ab]{2}[0-9]{3}"
    answers = _run(
        tiny_model,
        [
            chat_line(custom_id="chat", response_format=FORMAT, **common),
            completion_line(custom_id="json", guided_json=json.dumps(POINT), **common),
            completion_line(custom_id="choice", guided_choice=choice, **common),
            completion_line(custom_id="regex", structured_outputs={"regex": regex}, **common),
            completion_line(custom_id="rules", guided_grammar='root ::= "a" | "b" root', **common),
            completion_line(custom_id="free", **common),
            chat_line(
                custom_id="not",
                response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}},
                **common,
            ),
            completion_line(custom_id="large", guided_regex="a" * 2000, **common),
            completion_line(custom_id="slow", guided_json=SLOW_SCHEMA, **common),
            completion_line(custom_id="contradiction", guided_regex="a", ignore_eos=True, **common),
        ],
    )
    texts = {
        name: answer["body"]["choices"][0].get("text") or answer["body"]["choices"][0]["message"]["content"]
        for name, answer in answers.items()
        if answer["status_code"] == 200
    }
    assert texts.keys() == {"chat", "json", "choice", "regex", "rules", "free"}
    assert json.loads(texts["chat"]).keys() == json.loads(texts["json"]).keys() == {"x", "y"}
    assert texts["choice"] in choice
    assert re.fullmatch(regex, texts["regex"])
    assert re.fullmatch("b*a", texts["rules"])
    errors = {name: answer["body"]["error"] for name, answer in answers.items() if answer["status_code"] == 400}
    assert {name: (error["type"], error["code"], error["param"]) for name, error in errors.items()} == {
        "not": ("invalid_request_error", "invalid_grammar", "response_format"),
        "large": ("invalid_request_error", "grammar_too_large", "guided_regex"),
        "slow": ("invalid_request_error", "grammar_too_complex", "guided_json"),
        "contradiction": ("invalid_request_error", "invalid_value", "ignore_eos"),
    }


def test_each_choice_has_the_log_probability_that_echoing_it_has(tiny_model: Path) -> None:
    tokenizer, choices = Tokenizer.from_directory(tiny_model), ["the", "you", "the end"]
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in choices]
    prompt, asked = tokenizer.encode("hello"), {"guided_choice": choices, "choice_logprobs": True, "max_tokens": 20}
    echoed = [
        completion_line(custom_id=str(n), prompt=[*prompt, *ids], echo=True, logprobs=0, max_tokens=0)
        for n, ids in enumerate(encoded)
    ]
    answers = _run(
        tiny_model,
        [completion_line(custom_id="text", prompt=prompt, **asked), chat_line(custom_id="chat", n=2, **asked), *echoed],
    )
    bodies = {name: answer["body"] for name, answer in answers.items()}
    expected = [
        sum(bodies[str(n)]["choices"][0]["logprobs"]["token_logprobs"][len(prompt) :]) for n in range(len(choices))
    ]
    assert bodies["text"]["choice_logprobs"] == pytest.approx(dict(zip(choices, expected, strict=True)), abs=1e-4)
    assert bodies["text"]["usage"]["prompt_tokens"] == len(prompt)
    assert bodies["chat"]["choice_logprobs"].keys() == set(choices)
    assert max(bodies["chat"]["choice_logprobs"].values()) < 0
    assert "choice_logprobs" not in bodies["0"]
    assert ChatCompletion.model_validate(bodies["chat"]).choices[1].message.content in choices


@pytest.fixture(scope="module", params=["marked_calls", "bare_calls"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("calls") / "tiny"
    make_checkpoint(path, max_position_embeddings=4096, initializer_range=0.6)
    tokens = QWEN3_TOKENS if request.param == "marked_calls" else LLAMA3_TOKENS
    chat_model(path, template_source(request.param), tokens)
    engine = load_engine(path)
    yield engine
    engine.close()


def run(engine: Engine, lines: list[bytes]) -> dict[str, ChatCompletion]:
    """The answers by custom_id, as OpenAI's client reads them."""
    records: list[Mapping[str, Any]] = []
    # Random weights that begin to reason do not stop; tests of reasoning have answers written by hand.
    settings = ModelSettings(name="m", reasoning_format="none")
    offline = OfflineRun(engine, settings, window=16, write=records.append)
    feed = LineFeed(lines, LimitSettings(), capacity=16, by_prefix=True)
    feed.start()
    offline.run(feed, lambda: False, lambda: None)
    assert all(record["response"]["status_code"] == 200 for record in records), records
    return {
        record["custom_id"]: ChatCompletion.model_validate(record["response"]["body"], strict=True)
        for record in records
    }


def test_calls_that_must_be_made_are_made_and_keep_to_their_schemas(engine: Engine) -> None:
    tools = {"tools": [WEATHER, TIME], "max_tokens": 300}
    lines = [chat_line(custom_id=f"r{n}", tool_choice="required", seed=n, n=2, **tools) for n in range(3)]
    lines += [chat_line(custom_id=f"n{n}", tool_choice=NAMED, seed=n, logprobs=True, **tools) for n in range(2)]
    lines += [
        chat_line(custom_id="free", seed=1, max_tokens=20),
        chat_line(custom_id="auto", seed=1, **{**tools, "max_tokens": 60}),
    ]

    answers = run(engine, lines)

    for custom_id, answer in answers.items():
        if custom_id[0] not in "rn":
            continue
        for choice in answer.choices:
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
            for call in choice.message.tool_calls or []:
                assert call.type == "function"
                jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
                assert call.function.name == "time" or custom_id.startswith("r")
    assert run(engine, [lines[-2]])["free"].choices == answers["free"].choices


def test_an_answer_of_a_given_form_beside_tools_keeps_to_it_or_is_calls(engine: Engine) -> None:
    lines = [
        chat_line(custom_id=str(n), tools=[WEATHER], response_format=YES_NO, seed=n, max_tokens=300) for n in range(4)
    ]

    for answer in run(engine, lines).values():
        [choice] = answer.choices
        if choice.message.tool_calls:
            assert choice.finish_reason == "tool_calls"
        else:
            assert json.loads(choice.message.content or "") in ("yes", "no")
