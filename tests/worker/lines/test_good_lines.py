"""What a line may hold, and what it means."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from settings import LimitSettings
from tests.support.request_lines import CHAT, batch_line, body_of, chat_line, completion_line, error_of, parse, raw_line
from worker.lines.bodies import CompletionBody
from worker.lines.chat import ChatBody, ChatMessage
from worker.lines.errors import LineError, NotIgnorable
from worker.lines.fields import ServiceFields
from worker.lines.files import CustomIds
from worker.lines.ignored import IgnoredParams
from worker.lines.request_line import Endpoint
from worker.lines.scoring import ScoreBody

GIVEN: dict[str, object] = {
    "user": "u",
    "safety_identifier": "s",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "flex",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "prediction": {"type": "content", "content": "text"},
}


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


def test_where_an_answer_ends_and_what_comes_back_arrives() -> None:
    parameters = {
        "max_tokens": 5, "min_tokens": 2, "n": 2, "ignore_eos": True, "return_token_ids": True, "logprobs": 3,
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
        {"skip_special_tokens": True, "spaces_between_special_tokens": True, "include_stop_str_in_output": False},
        {"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False, "verbosity": "medium"},
        {"length_penalty": 1, "bad_words": [], "logits_processors": [], "allowed_token_ids": None},
        {"add_generation_prompt": True, "continue_final_message": False, "include_reasoning": True, "priority": 0},
    ],
)
def test_service_fields_and_values_that_ask_for_nothing_are_accepted(parameters: dict[str, object]) -> None:
    line = parse(completion_line(**parameters))

    assert isinstance(line.body, CompletionBody)
    assert line.body.prompt == "hello"


@pytest.mark.parametrize(
    ("given", "prompt"), [(["hello"], "hello"), ([[1, 2]], (1, 2)), ([7], (7,))], ids=["text", "ids", "one id"]
)
def test_a_list_of_one_prompt_is_that_prompt(given: list[object], prompt: object) -> None:
    body = body_of(raw_line({"prompt": given}))

    assert isinstance(body, CompletionBody)
    assert body.prompt == prompt


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT_COMPLETIONS, Endpoint.COMPLETIONS])
def test_azures_paths_are_openais(endpoint: Endpoint) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body: object = {"messages": messages} if endpoint is Endpoint.CHAT_COMPLETIONS else {"prompt": "hi"}

    line = parse(batch_line(endpoint.removeprefix("/v1"), body))

    assert line.endpoint is endpoint
    assert line == parse(batch_line(endpoint, body))


def test_no_alternatives_are_asked_for_without_log_probabilities() -> None:
    assert body_of(chat_line(logprobs=False, top_logprobs=0)).num_logprobs is None


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


def test_a_custom_id_may_stand_once() -> None:
    seen = CustomIds()
    seen.add(parse(completion_line(custom_id="a"), 0))
    seen.add(parse(completion_line(custom_id="b"), 1))

    with pytest.raises(LineError, match="was used by an earlier line") as raised:
        seen.add(parse(completion_line(custom_id="a"), 2))

    assert (raised.value.code, raised.value.param) == ("duplicate_custom_id", "custom_id")
    assert (raised.value.index, raised.value.custom_id) == (2, "a")


def test_a_line_number_collides_with_an_explicit_custom_id() -> None:
    seen = CustomIds()
    seen.add(parse(completion_line(custom_id="line-3"), 0))

    with pytest.raises(LineError):
        seen.add(parse(completion_line(), 2))


def _message(**message: object) -> ChatMessage:
    body = parse(chat_line(messages=[message])).body
    assert isinstance(body, ChatBody)
    return body.messages[0]


@pytest.mark.parametrize("keys", [("role", "content", "name"), ("name", "content", "role")])
def test_a_message_keeps_the_order_its_line_had(keys: tuple[str, ...]) -> None:
    values = {"role": "user", "content": "hello", "name": "a"}
    assert list(_message(**{key: values[key] for key in keys}).as_given()) == list(keys)


def test_a_null_that_counts_as_absent_is_still_in_what_was_given() -> None:
    message = _message(role="user", content="hello", name=None)
    assert message.name is None
    assert message.as_given() == {"role": "user", "content": "hello", "name": None}


def test_what_was_given_cannot_be_changed_through_a_copy() -> None:
    message = _message(role="user", content="hello")
    message.as_given()["content"] = "other"
    assert message.as_given() == {"role": "user", "content": "hello"}


@pytest.mark.parametrize("line", [completion_line, chat_line])
def test_every_service_field_is_accepted_and_changes_nothing(line: Callable[..., bytes]) -> None:
    assert set(GIVEN) == set(ServiceFields.model_fields)
    with_fields, without = parse(line(**GIVEN)), parse(line())

    assert with_fields.prompt_key() == without.prompt_key()
    plain = dict.fromkeys(GIVEN)
    assert with_fields.body.model_dump() | plain == without.body.model_dump()


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("user", 3, "invalid_type"),
        ("metadata", {"a": 1}, "invalid_type"),
        ("store", "yes", "invalid_type"),
        ("service_tier", "best", "invalid_value"),
        ("prompt_cache_retention", "for ever", "invalid_value"),
        ("prediction", "text", "invalid_type"),
    ],
)
def test_a_service_field_has_openais_form(name: str, value: object, code: str) -> None:
    error = error_of(chat_line(**{name: value}))

    assert error.code == code
    assert error.param is not None
    assert error.param.startswith(name)


def ignoring(*names: str) -> IgnoredParams:
    return IgnoredParams(names, LimitSettings())


def test_ignored_parameters_are_left_out_and_their_lines_counted() -> None:
    ignored = ignoring("best_of", "foo")
    lines = [
        completion_line(best_of=3, foo=None),
        batch_line(CHAT, {"messages": [{"role": "user", "content": "\u00e9"}], "foo": 1}),
        completion_line(temperature=0.1),
        rb'{"prompt": "hello", "best\u005fof": 2}',
    ]

    kept = [parse(raw, index) for index, raw in enumerate(ignored.strip(lines))]

    plain = batch_line(CHAT, {"messages": [{"role": "user", "content": "\u00e9"}]})
    wanted = [completion_line(), plain, completion_line(temperature=0.1), completion_line()]
    assert kept == [parse(raw, index) for index, raw in enumerate(wanted)]
    assert ignored.counts == {"best_of": 2, "foo": 2}
    assert ignored.text == "ignored best_of in 2 lines, foo in 2 lines"


@pytest.mark.parametrize(
    "raw",
    [
        b"{bad, foo",
        b'["foo"]',
        b'{"prompt": "a", "prompt": "b", "foo": 1}',
        b'{"prompt": "a", "foo": 1, "temperature": NaN}',
        b'{"body": "foo"}',
        b'{"prompt": "foo"}',
        b'{"prompt": "a", "metadata": {"foo": "1"}}',
        b'{"prompt": "' + b"a" * 262_144 + b'", "foo": 1}',
    ],
    ids=lambda raw: raw[:40].decode(),
)
def test_a_line_without_them_or_that_cannot_be_read_stays_as_it_is(raw: bytes) -> None:
    ignored = ignoring("foo")

    assert list(ignored.strip([raw])) == [raw]
    assert ignored.counts == {"foo": 0}


SIDES = sorted({name for form in ScoreBody.forms for name in form})


@pytest.mark.parametrize(
    "name", ["prompt", "messages", "input", "query", *SIDES, "custom_id", "method", "url", "body", ""]
)
def test_what_makes_a_line_a_request_cannot_be_ignored(name: str) -> None:
    with pytest.raises(NotIgnorable, match="accepted: a parameter of the body, none of messages, prompt, input"):
        ignoring("best_of", name)
