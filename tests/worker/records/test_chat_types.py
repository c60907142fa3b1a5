"""Chat records as the official client's types read them, and records that are the same each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessageFunctionToolCall

from engine.request import Completion, FinishReason, Request, TokenLogprobs
from tests.support.build_request import build_request
from tests.support.chat_models import QWEN3_TOKENS, answered, chat_model, template_source
from tests.support.outputs import request_output
from tests.support.request_lines import chat_line, parse
from tests.support.served_models import served_model
from worker.records.record import encode_record

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("weather", "time")]
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


class Model:
    """Records of one model with tools and reasoning."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = chat_model(path, template_source("marked_calls"), QWEN3_TOKENS)
        self.served = served_model(self.tokenizer, max_model_len=4096)
        self.num_reasoning_tokens = 0  # of the last record

    def record(self, *completions: Completion, job_id: str = "s0-1", **parameters: object) -> dict[str, object]:
        line = parse(chat_line(**{"tools": TOOLS, **parameters}), index=3)
        record, self.num_reasoning_tokens = self.served.records(job_id, created_s=1_700_000_000).of_output(
            line, request_output("3", *completions)
        )
        return record

    def parsed(self, *completions: Completion, job_id: str = "s0-1", **parameters: object) -> ChatCompletion:
        body: Any = self.record(*completions, job_id=job_id, **parameters)["response"]
        return ChatCompletion.model_validate(body["body"], strict=True)


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path)


def test_calls_reasoning_and_text_in_one_answer(model: Model) -> None:
    completion = model.parsed(
        answered(model.tokenizer, f"<think>\nhm\n</think>\n\nI look.\n{ROME}\n{NOW}"),
        answered(model.tokenizer, "Sunny.", index=1),
        answered(model.tokenizer, NOW, index=2),
        n=3,
    )

    first, second, third = completion.choices
    assert [choice.finish_reason for choice in completion.choices] == ["tool_calls", "stop", "tool_calls"]
    assert (first.message.content, second.message.content, third.message.content) == ("I look.", "Sunny.", None)
    assert first.message.model_extra == {"reasoning_content": "hm"}
    assert second.message.model_extra == {}
    calls = first.message.tool_calls or []
    assert all(isinstance(call, ChatCompletionMessageFunctionToolCall) for call in calls)
    assert [call.function.arguments for call in calls if call.type == "function"] == ['{"city": "Rome"}', "{}"]
    assert second.message.tool_calls is None
    usage = completion.usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == len(model.tokenizer.encode("<think>\nhm\n</think>"))
    assert model.num_reasoning_tokens == usage.completion_tokens_details.reasoning_tokens


def test_logprobs_of_an_answer_with_calls(model: Model) -> None:
    text = answered(model.tokenizer, ROME)
    logprobs = tuple(TokenLogprobs(token_id, -0.5, ((token_id, -0.5), (1, -2.0))) for token_id in text.token_ids)
    completion = Completion(0, text.text, text.token_ids, FinishReason.STOP, None, logprobs)

    [choice] = model.parsed(completion, logprobs=True, top_logprobs=2, return_token_ids=True).choices

    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == len(text.token_ids)
    assert choice.finish_reason == "tool_calls"


def test_an_answer_that_was_cut_says_so(model: Model) -> None:
    cut = answered(model.tokenizer, f"{ROME}\n", finish_reason=FinishReason.LENGTH)

    [choice] = model.parsed(cut).choices

    assert (choice.finish_reason, len(choice.message.tool_calls or [])) == ("length", 1)


def test_ids_of_calls_are_the_same_each_time_and_differ_everywhere(model: Model) -> None:
    completions = [answered(model.tokenizer, f"{ROME}\n{NOW}", index=index) for index in range(2)]

    first = encode_record(model.record(*completions, n=2))

    assert first == encode_record(model.record(*completions, n=2))
    parsed = [model.parsed(*completions, n=2), model.parsed(*completions, n=2, job_id="s0-2")]
    ids = [call.id for body in parsed for choice in body.choices for call in choice.message.tool_calls or []]
    assert len(set(ids)) == 8
    assert all(len(call_id) <= 40 for call_id in ids)


def test_an_answer_may_go_back_into_the_conversation(model: Model) -> None:
    body: Any = model.record(answered(model.tokenizer, f"<think>hm</think>{ROME}"))["response"]
    message = body["body"]["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}
    question = {"role": "user", "content": "Rome?"}

    line = parse(chat_line(messages=[question, message, result], tools=TOOLS))
    request = build_request(model.served.requests, line)

    assert isinstance(request, Request)
    prompt = model.tokenizer.decode(list(request.prompt_token_ids), skip_special_tokens=False)
    assert f"<think>\nhm\n</think>\n\n{ROME}<|im_end|>" in prompt
    assert prompt.endswith("<tool_response>\nsunny\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
