"""What a line may hold, and what it means."""

from __future__ import annotations

import pytest

from tests.support.request_lines import CHAT, batch_line, body_of, chat_line, completion_line, parse, raw_line
from worker.lines.bodies import CompletionBody
from worker.lines.chat import ChatBody
from worker.lines.files import CustomIds
from worker.lines.request_line import Endpoint


def test_an_openai_batch_line_keeps_its_custom_id() -> None:
    line = parse(batch_line(CHAT, {"model": "m", "messages": [{"role": "user", "content": "hi"}]}), index=4)

    assert (line.index, line.custom_id, line.endpoint) == (4, "a", Endpoint.CHAT_COMPLETIONS)
    assert isinstance(line.body, ChatBody)
    assert line.body.messages[0].text == "hi"


def test_a_body_alone_is_numbered_from_one() -> None:
    assert parse(completion_line(), index=0).custom_id == "line-1"
    assert parse(chat_line(), index=41).custom_id == "line-42"


def test_a_producers_own_number_is_not_taken_by_a_line_without_one() -> None:
    custom_ids = CustomIds()
    for index, raw in enumerate([completion_line(custom_id="2"), completion_line(), completion_line(custom_id="3")]):
        custom_ids.add(parse(raw, index))


def test_a_body_alone_may_carry_its_custom_id() -> None:
    line = parse(completion_line(custom_id="mine"))

    assert line.custom_id == "mine"
    assert line.endpoint is Endpoint.COMPLETIONS


def test_every_sampling_parameter_arrives() -> None:
    parameters = {
        "max_tokens": 5, "min_tokens": 2, "temperature": 0, "top_p": 0.5, "top_k": 4, "min_p": 0.1, "seed": -3, "n": 2,
        "ignore_eos": True, "repetition_penalty": 1.1, "presence_penalty": -2, "frequency_penalty": 2,
        "return_token_ids": True, "logprobs": 3,
    }  # fmt: skip
    body = body_of(completion_line(stop="x", stop_token_ids=[1, 2], logit_bias={"7": 1}, **parameters))

    assert {name: getattr(body, name) for name in parameters} == parameters
    assert (body.stop, body.stop_token_ids, body.logit_bias) == (("x",), (1, 2), {7: 1.0})
    assert body.num_logprobs == 3


def test_token_ids_are_a_prompt() -> None:
    body = body_of(raw_line({"prompt": [1, 2, 3]}))

    assert isinstance(body, CompletionBody)
    assert body.prompt == (1, 2, 3)


@pytest.mark.parametrize(
    ("parameters", "num_logprobs"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 5}, 5)],
)
def test_chat_spells_logprobs_in_two_parameters(parameters: dict[str, object], num_logprobs: int | None) -> None:
    assert body_of(chat_line(**parameters)).num_logprobs == num_logprobs


@pytest.mark.parametrize(
    ("parameters", "num_logprobs", "num_prompt_logprobs"),
    [({"echo": True}, None, None), ({"echo": True, "logprobs": 2}, 2, 2), ({"logprobs": 2}, 2, None)],
)
def test_log_probabilities_of_the_prompt_are_those_that_are_echoed(
    parameters: dict[str, object], num_logprobs: int | None, num_prompt_logprobs: int | None
) -> None:
    body = body_of(completion_line(max_tokens=0 if "echo" in parameters else 1, **parameters))

    assert isinstance(body, CompletionBody)
    assert (body.num_logprobs, body.num_prompt_logprobs) == (num_logprobs, num_prompt_logprobs)


def test_chat_has_two_names_for_the_output_limit() -> None:
    assert body_of(chat_line()).max_output_tokens is None
    assert body_of(chat_line(max_tokens=3)).max_output_tokens == 3
    assert body_of(chat_line(max_completion_tokens=4)).max_output_tokens == 4


def test_null_means_the_default() -> None:
    nulls = completion_line(temperature=None, stop=None, stream=None, tool_choice=None)

    assert body_of(nulls).model_dump() == body_of(completion_line()).model_dump()


@pytest.mark.parametrize(
    "parameters",
    [
        {"stream": False, "best_of": 1, "echo": False, "suffix": ""},
        {"response_format": {"type": "text"}},
        {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "metadata": {"a": "b"}, "store": False},
        {"service_tier": "auto"},
        {"service_tier": "default"},
        {"tools": [], "tool_choice": "none", "functions": [], "function_call": "none", "parallel_tool_calls": True},
    ],
)
def test_service_fields_and_values_that_ask_for_nothing_are_accepted(parameters: dict[str, object]) -> None:
    line = parse(completion_line(**parameters))

    assert isinstance(line.body, CompletionBody)
    assert line.body.prompt == "hello"


def test_an_assistant_message_may_come_back_as_openai_returned_it() -> None:
    message: dict[str, object] = {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "annotations": [],
        "audio": None,
    }

    body = body_of(raw_line({"messages": [message, {"role": "user", "content": "go on"}]}))

    assert isinstance(body, ChatBody)
    assert body.messages[0].text == "hi"


def test_text_parts_reach_the_template_as_one_string() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]

    body = body_of(raw_line({"messages": [{"role": "user", "content": parts}]}))

    assert isinstance(body, ChatBody)
    assert body.messages[0].for_template() == {"role": "user", "content": "one\ntwo"}


def test_tool_arguments_reach_the_template_as_an_object() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": 2}'}}
    answer = {"role": "tool", "tool_call_id": "c1", "content": "3"}
    body = body_of(raw_line({"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}, answer]}))

    assert isinstance(body, ChatBody)
    rendered = body.messages[0].for_template()
    assert rendered["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"b": 1, "a": 2}}}
    ]
    assert rendered["content"] == ""
    assert body.messages[1].for_template() == answer


def test_an_escaped_pair_of_surrogates_is_one_character() -> None:
    body = body_of(rb'{"prompt": "\ud83d\ude00"}')

    assert isinstance(body, CompletionBody)
    assert body.prompt == "\N{GRINNING FACE}"


def test_brackets_inside_strings_do_not_nest() -> None:
    line = parse(raw_line({"prompt": '"[{' * 500 + "\\"}))

    assert isinstance(line.body, CompletionBody)


def test_the_deepest_allowed_nesting_is_accepted() -> None:
    deepest: object = 1
    for _ in range(30):  # with the line and chat_template_kwargs around it: 32
        deepest = [deepest]
    line = parse(chat_line(chat_template_kwargs={"a": deepest}))

    assert isinstance(line.body, ChatBody)


def test_a_body_may_not_be_changed() -> None:
    body = body_of(completion_line())

    with pytest.raises(ValueError, match="frozen"):
        body.n = 3
