"""Lines of /v1/responses: the conversation of each, what is refused, and the answer as OpenAI's package reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseOutputMessage, ResponseReasoningItem

from engine.errors import InvalidRequest, PromptTooLong
from engine.request import Completion, FinishReason, Request
from settings import LimitSettings
from tests.support.fake_engine import QWEN3_TOKENS, answered, chat_model, request_output, served_model, template_source
from tests.support.processes import wait_until
from tests.support.registry import TestRegistry
from tests.support.request_lines import batch_line, build_request, chat_line, error_of, parse
from tests.support.tiny_tokenizer import CHAT_TEMPLATE
from tests.support.workers import WorkerProcesses
from worker.client import BatchClient
from worker.lines.chat import ChatBody
from worker.lines.ignored import IgnoredParams
from worker.lines.request_line import Endpoint
from worker.lines.responses import responses_name
from worker.records.failure import too_large_record
from worker.records.record import RecordContext, encode_record

URL = "/v1/responses"
WEATHER: dict[str, Any] = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
USER = {"role": "user", "content": "Rome?"}


def _line(**body: Any) -> bytes:
    return batch_line(URL, {"input": "hi", **body}, custom_id="a")


def _chat(raw: bytes) -> ChatBody:
    line = parse(raw)
    assert line.endpoint is Endpoint.RESPONSES
    assert isinstance(line.body, ChatBody)
    return line.body


def _call(call_id: str, arguments: str = "{}", **more: object) -> dict[str, object]:
    return {"type": "function_call", "call_id": call_id, "name": "weather", "arguments": arguments, **more}


def _reasoning(text: str) -> dict[str, object]:
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def _said(text: str) -> dict[str, object]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [part]}


def _chat_call(call_id: str, arguments: dict[str, object] | None = None) -> dict[str, object]:
    return {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": arguments or {}}}


CONVERSATIONS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "a text": ({"input": "hi"}, [{"role": "user", "content": "hi"}]),
    "instructions": (
        {"instructions": "be brief"},
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
    ),
    "parts, and roles": (
        {
            "input": [
                {"role": "developer", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text} for text in "bc"]},
            ]
        },
        [{"role": "developer", "content": "a"}, {"role": "user", "content": "b\nc"}],
    ),
    "an earlier turn with all that it may have": (
        {
            "input": [
                USER,
                _reasoning("hm"),
                _said("I look."),
                _call("1", '{"city": "Rome"}'),
                _call("2", "", id="fc_2"),
            ]
        },
        [
            USER,
            {
                "role": "assistant",
                "reasoning_content": "hm",
                "content": "I look.",
                "tool_calls": [_chat_call("1", {"city": "Rome"}), _chat_call("2")],
            },
        ],
    ),
    "outputs of calls": (
        {
            "input": [
                _call("1"),
                {"type": "function_call_output", "call_id": "1", "output": "sunny"},
                _said("Sunny."),
                {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "rain"}]},
            ]
        },
        [
            {"role": "assistant", "content": "", "tool_calls": [_chat_call("1")]},
            {"role": "tool", "tool_call_id": "1", "content": "sunny"},
            {"role": "assistant", "content": "Sunny."},
            {"role": "tool", "tool_call_id": "2", "content": "rain"},
        ],
    ),
    "what comes behind a call is another message": (
        {"input": [_call("1"), _said("Wait."), _said("Still."), _reasoning("x")]},
        [
            {"role": "assistant", "content": "", "tool_calls": [_chat_call("1")]},
            {"role": "assistant", "content": "Wait."},
            {"role": "assistant", "content": "Still."},
            {"role": "assistant", "content": "", "reasoning_content": "x"},
        ],
    ),
    "a summary where there is no more, and a refusal": (
        {
            "input": [
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "brief"}]},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
                {"type": "reasoning", "summary": [], "encrypted_content": None},
            ]
        },
        [{"role": "assistant", "reasoning_content": "brief", "content": "No."}],
    ),
}


@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_items_become_the_messages_that_they_are(kind: str) -> None:
    body, messages = CONVERSATIONS[kind]
    assert [message.for_template() for message in _chat(_line(**body)).messages] == messages


def test_parameters_are_those_of_chat() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    format_ = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    ours = _chat(
        _line(
            model="m", max_output_tokens=7, temperature=0.5, top_p=0.9, parallel_tool_calls=False,
            text={"format": format_, "verbosity": "medium"}, reasoning={"effort": "low"}, tools=[WEATHER],
            tool_choice={"type": "function", "name": "weather"},
        )
    )  # fmt: skip
    function = {key: value for key, value in WEATHER.items() if key != "type"}
    theirs = parse(
        chat_line(
            model="m", max_completion_tokens=7, temperature=0.5, top_p=0.9, parallel_tool_calls=False,
            messages=[{"role": "user", "content": "hi"}], reasoning_effort="low",
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
            tools=[{"type": "function", "function": function}],
            tool_choice={"type": "function", "function": {"name": "weather"}},
        )
    ).body  # fmt: skip
    assert isinstance(theirs, ChatBody)
    assert ours.model_dump(exclude={"asked"}) == theirs.model_dump()
    assert ours.tools[0].as_given() == theirs.tools[0].as_given()


NOTHING: dict[str, object] = {
    "stream": False, "background": False, "truncation": "disabled", "include": [], "top_logprobs": 0, "store": True,
    "previous_response_id": None, "conversation": None, "max_tool_calls": None, "metadata": {"a": "b"}, "user": "u",
    "service_tier": "auto", "prompt_cache_key": "k", "safety_identifier": "s", "text": {"format": {"type": "text"}},
    "tools": [], "tool_choice": "auto", "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None, "generate_summary": None},
}  # fmt: skip


def test_what_asks_for_nothing_changes_nothing() -> None:
    assert _chat(_line(**NOTHING)).grammar is None
    text = {"text": {"format": {"type": "text"}}}
    given, plain = (_chat(_line(**fields)).model_dump(exclude={"asked"}) for fields in (NOTHING, text))
    assert given == plain


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no input": ({"input": []}, "input"),
    "an empty text": ({"input": ""}, "input"),
    "a number": ({"input": 7}, "input"),
    "an image": ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    "a file": ({"input": [USER, {"role": "user", "content": [{"type": "input_file"}]}]}, "input[1].content[0].type"),
    "an item of elsewhere": ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    "an item that is none": ({"input": ["x"]}, "input[0]"),
    "a role": ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    "a user's refusal": (
        {"instructions": "x", "input": [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]},
        "input[0].content[0].type",
    ),
    "arguments that are no JSON": ({"input": [USER, _call("1", "{")]}, "input[1].arguments"),
    "sealed reasoning": ({"input": [{**_reasoning("x"), "encrypted_content": "z"}]}, "input[0].encrypted_content"),
    "a response of before": ({"previous_response_id": "resp_1"}, "previous_response_id"),
    "a conversation": ({"conversation": "conv_1"}, "conversation"),
    "a stream": ({"stream": True}, "stream"),
    "the background": ({"background": True}, "background"),
    "truncation": ({"truncation": "auto"}, "truncation"),
    "something included": ({"include": ["message.output_text.logprobs"]}, "include"),
    "log-probabilities": ({"top_logprobs": 2}, "top_logprobs"),
    "a limit of calls": ({"max_tool_calls": 3}, "max_tool_calls"),
    "another tool": ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    "a function's name": ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    "a function twice": ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
    "a choice of none": ({"tool_choice": "required"}, "tool_choice"),
    "a choice of another": (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "time"}},
        "tool_choice.name",
    ),
    "no tokens": ({"max_output_tokens": 0}, "max_output_tokens"),
    "chat's word for it": ({"max_completion_tokens": 3}, "max_completion_tokens"),
    "a temperature": ({"temperature": -1}, "temperature"),
    "a share": ({"top_p": "x"}, "top_p"),
    "a schema without a name": ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    "a name without a schema": ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    "a schema of text": ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
    "a name of text": ({"text": {"format": {"type": "text", "name": "x"}}}, "text.format.name"),
    "a description of text": ({"text": {"format": {"type": "text", "description": "x"}}}, "text.format.description"),
    "strict text": ({"text": {"format": {"type": "text", "strict": False}}}, "text.format.strict"),
    "a verbosity": ({"text": {"verbosity": "low"}}, "text.verbosity"),
    "an effort": ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    "a summary": ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
    "several answers": ({"n": 2}, "n"),
    "a form of chat": ({"response_format": {"type": "json_object"}}, "response_format"),
    "an inner name of ours": ({"asked": {}}, "asked"),
    "metadata that is no text": ({"metadata": {"a": 1}}, "metadata.a"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_the_rest_is_refused_by_name(kind: str) -> None:
    body, param = REFUSED[kind]
    error = error_of(_line(**body))
    assert error.param == param
    assert param in str(error)


def test_limits_are_those_of_chat() -> None:
    tools = [{"type": "function", "name": f"f{number}"} for number in range(129)]
    assert error_of(_line(tools=tools)).param == "tools"


def test_an_input_beside_messages_or_a_prompt_is_for_another_url() -> None:
    for key in ("messages", "prompt"):
        assert error_of(_line(**{key: "x"})).code == "url_mismatch"
    assert parse(b'{"input": "x"}').endpoint is Endpoint.EMBEDDINGS  # a body alone is what it was
    assert parse(batch_line("/responses", {"input": "x"}, custom_id="a")).endpoint is Endpoint.RESPONSES


def test_names_of_chat_in_a_refusal_are_those_of_responses() -> None:
    assert responses_name("messages[2].content") == "input.content"
    assert responses_name("response_format.json_schema.schema") == "text.format.schema"
    assert responses_name("tools[1].function.parameters") == "tools[1].parameters"
    assert responses_name("reasoning_effort is 'high', but") == "reasoning.effort is 'high', but"
    assert responses_name("temperature") == "temperature"


class Model:
    """One with tools and reasoning."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = chat_model(path, template_source("marked_calls"), QWEN3_TOKENS)
        self.served = served_model(self.tokenizer, max_model_len=4096)
        self.job = self.served.job("s0-1", created_s=1_700_000_000)

    def record(self, completion: Completion, **body: Any) -> dict[str, Any]:
        record, _ = self.job.of_output(parse(_line(**body), index=3), request_output("3", completion))
        encode_record(record)
        assert (record["custom_id"], record["error"]) == ("a", None)
        response: Any = record["response"]
        assert response["status_code"] == 200
        return dict(response["body"])

    def response(self, completion: Completion, **body: Any) -> Response:
        return Response.model_validate(self.record(completion, **body), strict=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"))


def test_the_prompt_is_that_of_the_chat(model: Model) -> None:
    items = [USER, _reasoning("hm"), _call("1", '{"city": "Rome"}')]
    items += [{"type": "function_call_output", "call_id": "1", "output": "sunny"}]
    ours = build_request(model.served.requests, parse(_line(input=items, tools=[WEATHER], instructions="be brief")))
    messages = [
        {"role": "system", "content": "be brief"},
        USER,
        {"role": "assistant", "reasoning_content": "hm", "tool_calls": [_chat_call("1") | {
            "function": {"name": "weather", "arguments": '{"city": "Rome"}'}
        }]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]  # fmt: skip
    function = {key: value for key, value in WEATHER.items() if key != "type"}
    line = parse(chat_line(messages=messages, tools=[{"type": "function", "function": function}]))
    theirs = build_request(model.served.requests, line)
    assert isinstance(ours, Request)
    assert isinstance(theirs, Request)
    assert ours.prompt_token_ids == theirs.prompt_token_ids
    assert ours.params == theirs.params


def test_an_answer_is_a_response_object(model: Model) -> None:
    response = model.response(
        answered(model.tokenizer, f"<think>\nhm\n</think>\n\nI look.\n{ROME}"), tools=[WEATHER], metadata={"a": "b"}
    )
    assert (response.object, response.status, response.incomplete_details) == ("response", "completed", None)
    assert (response.id, response.created_at, response.error) == ("resp_s0-1-3", 1_700_000_000, None)
    assert response.metadata == {"a": "b"}
    thought, said, call = response.output
    assert isinstance(thought, ResponseReasoningItem)
    assert isinstance(said, ResponseOutputMessage)
    assert isinstance(call, ResponseFunctionToolCall)
    assert [part.text for part in thought.content or []] == ["hm"]
    assert (response.output_text, said.status) == ("I look.", "completed")
    assert (call.name, call.arguments) == ("weather", '{"city": "Rome"}')
    assert len({thought.id, said.id, call.id, call.call_id}) == 4
    usage = response.usage
    assert usage is not None
    assert usage.output_tokens_details.reasoning_tokens == len(model.tokenizer.encode("<think>\nhm\n</think>"))
    assert usage.input_tokens_details.cached_tokens == request_output("3").num_cached_tokens
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_an_answer_that_was_cut_is_incomplete(model: Model) -> None:
    response = model.response(answered(model.tokenizer, "Sun", finish_reason=FinishReason.LENGTH), max_output_tokens=1)
    assert (response.status, response.output_text, response.max_output_tokens) == ("incomplete", "Sun", 1)
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].to_dict()["status"] == "incomplete"
    only_thought = model.response(answered(model.tokenizer, "<think>\nhm", finish_reason=FinishReason.LENGTH))
    assert [item.type for item in only_thought.output] == ["reasoning"]


def test_what_was_asked_is_repeated(model: Model) -> None:
    format_ = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    asked: dict[str, Any] = {
        "instructions": "be brief", "temperature": 0.5, "top_p": 0.9, "max_output_tokens": 9, "user": "u",
        "parallel_tool_calls": False, "tool_choice": {"type": "function", "name": "weather"}, "tools": [WEATHER],
        "text": {"format": format_}, "reasoning": {"effort": None},
    }  # fmt: skip
    body = model.record(answered(model.tokenizer, "x"), **asked)
    Response.model_validate(body, strict=True)
    for name in ("instructions", "temperature", "top_p", "max_output_tokens", "user", "tool_choice", "text"):
        assert body[name] == asked[name]
    assert body["tools"] == [{**WEATHER, "strict": None}]
    assert (body["reasoning"], body["parallel_tool_calls"]) == ({"effort": None, "summary": None}, False)


def test_an_answer_may_go_back_into_the_input(model: Model) -> None:
    body = model.record(answered(model.tokenizer, f"<think>hm</think>I look.{ROME}"), tools=[WEATHER])
    call_id = body["output"][-1]["call_id"]
    result = {"type": "function_call_output", "call_id": call_id, "output": "sunny"}
    request = build_request(model.served.requests, parse(_line(input=[USER, *body["output"], result], tools=[WEATHER])))
    assert isinstance(request, Request)
    prompt = model.tokenizer.decode(list(request.prompt_token_ids), skip_special_tokens=False)
    assert f"I look.\n{ROME}" in prompt or f"I look.{ROME}" in prompt
    assert "<tool_response>\nsunny\n</tool_response>" in prompt


def test_errors_of_the_model_name_what_the_line_has(model: Model) -> None:
    line = parse(_line(reasoning={"effort": "high"}))
    with pytest.raises(InvalidRequest) as caught:
        build_request(model.served.requests, line)
    record = json.loads(encode_record(model.job.of_error(line, caught.value)))
    found = record["response"]["body"]["error"]
    assert found["param"] == "reasoning.effort"
    assert found["message"].startswith("reasoning.effort is 'high'")
    too_long = model.job.of_error(line, PromptTooLong(5000, 4096, param="messages"))
    assert json.loads(encode_record(too_long))["response"]["body"]["error"]["param"] == "input"
    too_large = json.loads(encode_record(too_large_record(line, 10, 5, RecordContext("s0-1", "m", 0))))
    assert too_large["response"]["body"]["error"]["param"] == "max_output_tokens"


def test_a_parameter_of_responses_can_be_ignored() -> None:
    ignored = IgnoredParams(["previous_response_id"], LimitSettings())
    [line] = ignored.strip([_line(previous_response_id="resp_1")])
    assert _chat(line).messages[0].text == "hi"


def test_a_job_of_such_lines_runs_on_a_worker(
    registry: TestRegistry, client: BatchClient, workers: WorkerProcesses
) -> None:
    workers.start(engine={"chat_template": CHAT_TEMPLATE})
    lines = [_line(max_output_tokens=4), batch_line(URL, {"input": [], "max_output_tokens": 4}, custom_id="b")]
    job_id = client.submit(lines, endpoint=URL)
    wait_until(lambda: client.status(job_id).status.is_terminal, timeout_s=60)
    found = {record["custom_id"]: record for record in client.results(job_id)}
    response = Response.model_validate(found["a"]["response"]["body"], strict=True)
    assert (response.status, bool(response.output_text)) == ("completed", True)
    assert found["b"]["response"]["body"]["error"]["param"] == "input"
    assert client.status(job_id).endpoint == URL
