"""Each way in which a line can be bad, with the code and the parameter its error names."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest

from tests.support.request_lines import CHAT, COMPLETIONS, batch_line, chat_line, completion_line, error_of, raw_line

MESSAGES = [{"role": "user", "content": "hello"}]

NOT_JSON = {
    "nothing": b"",
    "half an object": b'{"prompt": "a"',
    "two values": b'{"prompt": "a"} {"prompt": "b"}',
    "single quotes": b"{'prompt': 'a'}",
    "invalid UTF-8": b'{"prompt": "\xff"}',
    "an encoded surrogate": b'{"prompt": "\xed\xa0\x80"}',
    "a byte order mark": b'\xef\xbb\xbf{"prompt": "a"}',
    "an array": b"[1]",
    "a number": b"3",
    "null": b"null",
    "a string": b'"prompt"',
    "arrays too deep": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "objects too deep": b'{"a":' * 40 + b"1" + b"}" * 40,
    "a number of 5000 digits": b'{"prompt": "a", "seed": ' + b"1" * 5000 + b"}",
    "a control character in a string": b'{"prompt": "a\x00"}',
}

BAD_PARAMETERS: list[tuple[bytes, str, str]] = [
    (completion_line(temperature=math.nan), "invalid_value", "temperature"),
    (completion_line(temperature=math.inf), "invalid_value", "temperature"),
    (b'{"prompt": "a", "temperature": 1e999}', "invalid_value", "temperature"),
    (completion_line(temperature=-0.1), "invalid_value", "temperature"),
    (completion_line(temperature="1"), "invalid_type", "temperature"),
    (completion_line(temperature=True), "invalid_type", "temperature"),
    (completion_line(max_tokens=0), "invalid_value", "max_tokens"),
    (completion_line(max_tokens=1.5), "invalid_type", "max_tokens"),
    (completion_line(max_tokens="16"), "invalid_type", "max_tokens"),
    (completion_line(min_tokens=-1), "invalid_value", "min_tokens"),
    (completion_line(top_p=0), "invalid_value", "top_p"),
    (completion_line(top_p=1.1), "invalid_value", "top_p"),
    (completion_line(top_k=-2), "invalid_value", "top_k"),
    (completion_line(min_p=1.5), "invalid_value", "min_p"),
    (completion_line(seed=2**63), "invalid_value", "seed"),
    (completion_line(n=0), "invalid_value", "n"),
    (completion_line(n=9), "invalid_value", "n"),
    (completion_line(stop=3), "invalid_type", "stop"),
    (completion_line(stop=["a", 3]), "invalid_type", "stop[1]"),
    (completion_line(stop=[""]), "invalid_value", "stop[0]"),
    (completion_line(stop=["x"] * 17), "invalid_value", "stop"),
    (completion_line(stop_token_ids=[-1]), "invalid_value", "stop_token_ids[0]"),
    (completion_line(stop_token_ids=7), "invalid_type", "stop_token_ids"),
    (completion_line(allowed_token_ids=[]), "invalid_value", "allowed_token_ids"),
    (completion_line(allowed_token_ids=7), "invalid_type", "allowed_token_ids"),
    (completion_line(allowed_token_ids=[3, -1]), "invalid_value", "allowed_token_ids[1]"),
    (completion_line(allowed_token_ids=[1] * 1025), "invalid_value", "allowed_token_ids"),
    (completion_line(ignore_eos=1), "invalid_type", "ignore_eos"),
    (completion_line(repetition_penalty=0), "invalid_value", "repetition_penalty"),
    (completion_line(presence_penalty=2.1), "invalid_value", "presence_penalty"),
    (completion_line(frequency_penalty=-2.1), "invalid_value", "frequency_penalty"),
    (completion_line(logit_bias=[]), "invalid_type", "logit_bias"),
    (completion_line(logit_bias={"x": 1}), "invalid_value", "logit_bias.x"),
    (completion_line(logit_bias={"-1": 1}), "invalid_value", "logit_bias.-1"),
    (completion_line(logit_bias={"1": 101}), "invalid_value", "logit_bias.1"),
    (completion_line(logit_bias={"1": "1"}), "invalid_type", "logit_bias.1"),
    (completion_line(logit_bias={"7": 1, "07": 2}), "invalid_value", "logit_bias.07"),
    (completion_line(logit_bias={str(i): 1 for i in range(1025)}), "invalid_value", "logit_bias"),
    (completion_line(logprobs=21), "invalid_value", "logprobs"),
    (completion_line(logprobs=True), "invalid_type", "logprobs"),
    (completion_line(return_token_ids="yes"), "invalid_type", "return_token_ids"),
    (completion_line(metadata={"a": 1}), "invalid_type", "metadata.a"),
    (completion_line(model=""), "invalid_value", "model"),
    (completion_line(temprature=1), "unknown_parameter", "temprature"),
    (completion_line(top_logprobs=1), "unknown_parameter", "top_logprobs"),
    (completion_line(max_completion_tokens=1), "unknown_parameter", "max_completion_tokens"),
    (completion_line(foo=None), "unknown_parameter", "foo"),
    (raw_line({"prompt": ""}), "empty_prompt", "prompt"),
    (raw_line({"prompt": []}), "empty_prompt", "prompt"),
    (raw_line({"prompt": 3}), "invalid_type", "prompt"),
    (raw_line({"prompt": ["a", "b"]}), "invalid_type", "prompt"),
    (raw_line({"prompt": [1, True]}), "invalid_type", "prompt[1]"),
    (raw_line({"prompt": [1, -1]}), "invalid_value", "prompt[1]"),
    (raw_line({"prompt": [[1, 2, -1]]}), "invalid_value", "prompt[0]"),
    (raw_line({"prompt": [[1, 2, "a"]]}), "invalid_type", "prompt[0]"),
    (raw_line({"prompt": None}), "missing_parameter", "prompt"),
    (raw_line({"prompt": "a\ud800"}), "invalid_value", "prompt"),
    (raw_line({"prompt": "a", "user": "\udc00b"}), "invalid_value", "user"),
    (b'{"prompt": "a", "prompt": "b"}', "invalid_json_line", "prompt"),
    (b'{"prompt": "a", "logit_bias": {"1": 1, "1": 2}}', "invalid_json_line", "1"),
    (chat_line(temperature=math.nan), "invalid_value", "temperature"),
    (chat_line(prompt="a"), "invalid_value", "prompt"),
    (chat_line(top_logprobs=3), "invalid_value", "top_logprobs"),
    (chat_line(top_logprobs=21, logprobs=True), "invalid_value", "top_logprobs"),
    (chat_line(logprobs=3), "invalid_type", "logprobs"),
    (chat_line(max_tokens=3, max_completion_tokens=4), "invalid_value", "max_completion_tokens"),
    (chat_line(best_of=1), "unknown_parameter", "best_of"),
    (chat_line(chat_template_kwargs=[]), "invalid_type", "chat_template_kwargs"),
    (raw_line({"messages": []}), "invalid_value", "messages"),
    (raw_line({"messages": "hello"}), "invalid_type", "messages"),
    (raw_line({"messages": ["hello"]}), "invalid_type", "messages[0]"),
    (raw_line({"messages": [{"content": "a"}]}), "missing_parameter", "messages[0].role"),
    (raw_line({"messages": [{"role": "bot", "content": "a"}]}), "invalid_value", "messages[0].role"),
    (raw_line({"messages": [*MESSAGES, {"role": "user"}]}), "missing_parameter", "messages[1].content"),
    (raw_line({"messages": [{"role": "user", "content": 3}]}), "invalid_type", "messages[0].content"),
    (raw_line({"messages": [{"role": "user", "content": "\udfff"}]}), "invalid_value", "messages[0].content"),
    (
        raw_line({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
        "invalid_value",
        "messages[0].content[0].type",
    ),
    (
        raw_line({"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
        "missing_parameter",
        "messages[0].content[0].text",
    ),
    (raw_line({"messages": [{"role": "user", "content": "a", "foo": 1}]}), "unknown_parameter", "messages[0].foo"),
    (
        raw_line({"messages": [{"role": "user", "content": "a", "tool_call_id": "1"}]}),
        "invalid_value",
        "messages[0].tool_call_id",
    ),
    (
        raw_line(
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]}
        ),
        "invalid_type",
        "messages[0].tool_calls[0].function.arguments",
    ),
    *(
        (
            raw_line({"messages": [{"role": "assistant", "tool_calls": [{"function": call}]}]}),
            "invalid_value",
            "messages[0].tool_calls[0].function.arguments",
        )
        for call in (
            {"name": "f", "arguments": '{"a":' * 33 + "1" + "}" * 33},
            {"name": "f", "arguments": '{"a": 1, "a": 2}'},
            {"name": "f", "arguments": '{"a": -1e999}'},
        )
    ),
    (
        raw_line({"messages": [{"role": "assistant", "content": "a", "refusal": "b"}]}),
        "invalid_value",
        "messages[0].refusal",
    ),
]

TOOL = {"type": "function", "function": {"name": "f"}}
UNSUPPORTED: list[tuple[str, object]] = [
    ("stream", True),
    ("best_of", 2),
    ("suffix", "end"),
    ("guided_whitespace_pattern", " "),
    ("use_beam_search", True),
    ("skip_special_tokens", False),
    ("length_penalty", 1.1),
    ("length_penalty", True),
    ("stream_options", {"include_usage": True}),
    ("prompt_logprobs", 1),
    ("verbosity", "low"),
    ("tools", [TOOL]),
    ("tools", {}),
    ("functions", [TOOL["function"]]),
    ("tool_choice", "auto"),
    ("tool_choice", "required"),
    ("tool_choice", TOOL),
    ("function_call", "auto"),
]

ENVELOPES: list[tuple[bytes, str, str]] = [
    (batch_line("/v1/moderations", {"prompt": "a"}), "unknown_url", "url"),
    (batch_line("/v1/embeddings", {"prompt": "a"}), "url_mismatch", "url"),
    (batch_line("/v1/completions/", {"prompt": "a"}), "unknown_url", "url"),
    (raw_line({"custom_id": "a", "method": "POST", "url": 3, "body": {"prompt": "a"}}), "unknown_url", "url"),
    (batch_line(COMPLETIONS, {"messages": MESSAGES}), "url_mismatch", "url"),
    (batch_line(CHAT, {"prompt": "a"}), "url_mismatch", "url"),
    (batch_line(COMPLETIONS, {"prompt": "a"}, method="GET"), "invalid_value", "method"),
    (batch_line(COMPLETIONS, {"prompt": "a"}, extra=1), "unknown_parameter", "extra"),
    (batch_line(COMPLETIONS, "a"), "invalid_type", "body"),
    (batch_line(COMPLETIONS, None), "missing_parameter", "body"),
    (batch_line(COMPLETIONS, {}), "missing_parameter", "prompt"),
    (batch_line(CHAT, {}), "missing_parameter", "messages"),
    (raw_line({"custom_id": "a", "url": CHAT, "body": {}}), "missing_parameter", "method"),
    (raw_line({"custom_id": "a", "method": "POST", "body": {}}), "missing_parameter", "url"),
    (raw_line({"custom_id": "a", "model": "m"}), "missing_parameter", "prompt"),
    (batch_line(COMPLETIONS, {"prompt": "a", "temperature": math.nan}), "invalid_value", "temperature"),
]

CUSTOM_IDS: list[tuple[object, str]] = [
    (3, "invalid_type"),
    (None, "missing_parameter"),
    ("", "invalid_value"),
    ("x" * 513, "string_too_long"),
    ("a\ud800", "invalid_value"),
]


@pytest.mark.parametrize("raw", NOT_JSON.values(), ids=NOT_JSON.keys())
def test_a_line_that_is_no_json_object_is_refused_whole(raw: bytes) -> None:
    error = error_of(raw, index=6)

    assert error.code == "invalid_json_line"
    assert error.index == 6
    assert error.custom_id is None


@pytest.mark.parametrize(("raw", "code", "param"), BAD_PARAMETERS, ids=lambda value: str(value)[:70])
def test_a_bad_parameter_is_named(raw: bytes, code: str, param: str) -> None:
    error = error_of(raw, index=6)

    assert (error.code, error.param, error.custom_id) == (code, param, "line-7")
    assert param in error.message or param.rsplit(".", maxsplit=1)[-1] in error.message


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED)
def test_a_parameter_that_is_not_carried_out_is_refused_by_name(name: str, value: object) -> None:
    error = error_of(completion_line(**{name: value}))

    assert (error.code, error.param) == ("unsupported_parameter", name)
    assert f"{name} is" in error.message
    assert "not supported; accepted: " in error.message


def test_one_is_not_true_where_a_neutral_value_is_asked_for() -> None:
    assert error_of(completion_line(best_of=True)).param == "best_of"


def test_all_faults_of_a_line_are_told_and_the_first_is_the_errors_own() -> None:
    line = {"custom_id": "", "method": "GET", "url": COMPLETIONS, "more": 1}
    body = {"prompt": "a", "stream": True, "temperature": -1, "n": "2", "temprature": 1}

    error = error_of(raw_line({**line, "body": body}))

    assert (error.code, error.param, error.custom_id) == ("invalid_value", "custom_id", None)
    assert error.message.split("; also: ") == [
        "custom_id is empty",
        'unknown field "more"; accepted: custom_id, method, url and body; parameters go in body',
        'method is "GET"; accepted: "POST"',
        "stream is true, which is not supported; accepted: false",
        "temperature is -1; accepted: 0, or 1e-05 to 10000",
        'n is "2"; accepted: a whole number',
        'unknown parameter "temprature"; did you mean temperature?',
    ]


def test_all_limits_that_a_line_exceeds_are_told() -> None:
    told = error_of(completion_line(n=9, stop=["x"] * 17)).message

    assert told == (
        "n is 9; accepted: at most 8 (limits.max_n); also: stop has 17 entries; accepted: at most 16 (limits.max_stop)"
    )


@pytest.mark.parametrize(
    "raw",
    [
        completion_line(stop=[1] * 1000),
        completion_line(metadata={str(i): 1 for i in range(1000)}),
        completion_line(logit_bias={str(i): math.nan for i in range(1000)}),
    ],
    ids=["types", "values of an object", "NaN"],
)
def test_of_a_thousand_faults_the_first_eight_are_told(raw: bytes) -> None:
    told = error_of(raw).message.split("; also: ")

    assert len(told) == 9
    assert told[-1] == "and more"


@pytest.mark.parametrize(
    ("line", "written", "meant"),
    [
        (completion_line, "max_new_tokens", "max_tokens"),
        (completion_line, "max_completion_tokens", "max_tokens"),
        (chat_line, "max_output_tokens", "max_completion_tokens"),
        (chat_line, "stop_sequences", "stop"),
        (chat_line, "message", "messages"),
        (chat_line, "foo", None),
        (chat_line, "num_ctx", None),
        (completion_line, "context_window", None),
    ],
)
def test_a_name_that_is_near_is_offered_and_no_other(
    line: Callable[..., bytes], written: str, meant: str | None
) -> None:
    hint = "" if meant is None else f"; did you mean {meant}?"

    assert error_of(line(**{written: 1})).message == f'unknown parameter "{written}"{hint}'


def test_echo_is_for_completions() -> None:
    error = error_of(chat_line(echo=True))

    assert (error.code, error.param) == ("unknown_parameter", "echo")
    assert error_of(completion_line(echo=1)).param == "echo"


def test_no_tokens_at_all_are_asked_for_only_with_echo() -> None:
    error = error_of(completion_line(max_tokens=0, echo=False))

    assert (error.code, error.param) == ("invalid_value", "max_tokens")
    assert error.message == "max_tokens is 0; accepted: a whole number, 1 to 2147483647; 0 only with echo true"
    assert error_of(chat_line(max_tokens=0)).param == "max_tokens"


@pytest.mark.parametrize(("raw", "code", "param"), ENVELOPES, ids=lambda value: str(value)[:70])
def test_a_bad_envelope_is_named_and_keeps_its_custom_id(raw: bytes, code: str, param: str) -> None:
    error = error_of(raw)

    assert (error.code, error.param, error.custom_id) == (code, param, "a")


@pytest.mark.parametrize(("custom_id", "code"), CUSTOM_IDS)
def test_a_bad_custom_id_is_refused_and_never_returned(custom_id: object, code: str) -> None:
    for raw in (
        batch_line(COMPLETIONS, {"prompt": "a"}, custom_id=custom_id),
        completion_line(custom_id=custom_id),
    ):
        error = error_of(raw)
        assert (error.code, error.param, error.custom_id) == (code, "custom_id", None)


def test_a_line_above_the_byte_limit_is_refused_before_it_is_read() -> None:
    error = error_of(b'{"prompt": "' + b"a" * 262_144)

    assert error.code == "line_too_long"
    assert "limits.max_prompt_bytes" in error.message


def test_a_message_names_field_value_and_what_is_accepted() -> None:
    assert error_of(completion_line(top_p=1.1)).message == "top_p is 1.1; accepted: above 0, at most 1"
    assert (
        error_of(completion_line(temprature=1)).message == 'unknown parameter "temprature"; did you mean temperature?'
    )
    assert error_of(completion_line(n="2")).message == 'n is "2"; accepted: a whole number'


@pytest.mark.parametrize("raw", [raw_line({"prompt": 3, "user": "x" * 9000}), completion_line(stop=["s" * 9000, 1])])
def test_a_message_quotes_no_long_value(raw: bytes) -> None:
    assert len(error_of(raw).message) < 250


def test_every_error_is_ascii_whatever_the_key_was() -> None:
    error = error_of('{"prompt": "a", "clé\\ud800": 1}'.encode())

    json.dumps([error.message, error.param]).encode("ascii")
    assert error.message.isascii()
    assert error.param is not None
    assert error.param.isascii()
