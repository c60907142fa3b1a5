"""Calls that must be made, and answers beside tools, by a whole engine on random weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
import pytest
from openai.types.chat import ChatCompletion

from engine.engine import Engine
from settings import LimitSettings, ModelSettings
from tests.support.chat_models import LLAMA3_TOKENS, QWEN3_TOKENS, chat_model, template_source
from tests.support.engines import load_engine
from tests.support.request_lines import chat_line
from tests.support.tiny_checkpoint import make_checkpoint
from worker.offline import LineFeed, OfflineRun

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
