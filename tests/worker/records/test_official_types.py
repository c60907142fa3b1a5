"""Records as the official client's types read them, chat and echo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion as OpenAICompletion
from openai.types.chat import ChatCompletion, ChatCompletionMessageFunctionToolCall

from engine.engine import Engine
from engine.errors import PromptTooLong
from engine.request import Completion, FinishReason, Request, TokenLogprobs
from engine.text.tokenizer import Tokenizer
from settings import ModelSettings
from tests.support.engines import load_engine, run_all
from tests.support.fake_engine import QWEN3_TOKENS, answered, chat_model, request_output, served_model, template_source
from tests.support.request_lines import build_request, chat_line, completion_line, parse
from tests.support.tiny_checkpoint import make_checkpoint
from worker.records.record import encode_record
from worker.records.success import token_offsets
from worker.requests.served_model import ServedModel

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("weather", "time")]
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'

TEXT = "you are the \U0001f642 and<|im_end|> the"
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


class Model:
    """Records of one model with tools and reasoning."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = chat_model(path, template_source("marked_calls"), QWEN3_TOKENS)
        self.served = served_model(self.tokenizer, max_model_len=4096)
        self.num_reasoning_tokens = 0  # of the last record

    def record(self, *completions: Completion, job_id: str = "s0-1", **parameters: object) -> dict[str, object]:
        line = parse(chat_line(**{"tools": TOOLS, **parameters}), index=3)
        record, self.num_reasoning_tokens = self.served.job(job_id, created_s=1_700_000_000).of_output(
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


class Service:
    """Lines to `choices`, and to the whole body."""

    def __init__(self, path: Path) -> None:
        self.engine: Engine = load_engine(make_checkpoint(path, "qwen3"))
        self.served = ServedModel(self.engine, ModelSettings(name="m"))

    def body(self, **parameters: object) -> dict[str, Any]:
        line = parse(completion_line(**{**GREEDY, **parameters}))
        output = run_all(self.engine, [build_request(self.served.requests, line)])["r"]
        record, _ = self.served.job("j", created_s=1).of_output(line, output)
        response: Any = record["response"]
        body: dict[str, Any] = response["body"]
        return body

    def choice(self, **parameters: object) -> dict[str, Any]:
        (choice,) = self.body(**parameters)["choices"]
        found: dict[str, Any] = choice
        return found


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    return Service(tmp_path_factory.mktemp("echo") / "tiny")


def test_the_prompt_comes_before_its_continuation(service: Service) -> None:
    plain = service.choice(prompt=TEXT, max_tokens=5)
    echoed = service.choice(prompt=TEXT, max_tokens=5, echo=True)

    assert echoed == {**plain, "text": TEXT + plain["text"]}


def test_a_scored_prompt_is_openais_completion(service: Service) -> None:
    body = service.body(prompt=TEXT, max_tokens=0, echo=True, logprobs=2, model="m")
    (choice,) = body["choices"]
    logprobs = choice["logprobs"]
    prompt_ids = service.engine.tokenizer.encode(TEXT)

    assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == len(prompt_ids)
    assert body["usage"]["completion_tokens"] == 0
    assert logprobs["tokens"] == [service.engine.tokenizer.token_text(token_id) for token_id in prompt_ids]
    assert {len(column) for column in logprobs.values()} == {len(prompt_ids)}
    # The types do not know the nulls that the service sends for a first token; programs read them as they come.
    assert (logprobs["token_logprobs"].pop(0), logprobs["top_logprobs"].pop(0)) == (None, None)
    assert OpenAICompletion.model_validate(body, strict=True).choices[0].text == TEXT
    assert {len(top) for top in logprobs["top_logprobs"]} <= {2, 3}
    pairs = zip(logprobs["tokens"][1:], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    assert all(top[token] >= logprob for token, logprob, top in pairs)


def test_offsets_say_where_each_token_begins_in_the_text(service: Service) -> None:
    choice = service.choice(prompt=TEXT, max_tokens=3, echo=True, logprobs=0)
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]

    assert len(tokens) == len(offsets) == len(service.engine.tokenizer.encode(TEXT)) + 3
    for token, offset in zip(tokens, offsets, strict=True):
        assert "\ufffd" in token or choice["text"].startswith(token, offset)
    smile = TEXT.index("\U0001f642")
    assert offsets.count(smile) >= 2  # bytes of one character begin together
    assert offsets[-3] == len(TEXT)


def test_a_text_scores_as_it_does_in_the_middle_of_another(service: Service) -> None:
    """Programs that compare answers ask so: for the log-probability of an ending behind a context."""
    context, ending = "you are the", " and you"
    scored = service.choice(prompt=context + ending, max_tokens=1, echo=True, logprobs=1)["logprobs"]
    cut = [position for position, offset in enumerate(scored["text_offset"]) if offset >= len(context)][:-1]

    assert "".join(scored["tokens"][position] for position in cut) == ending
    generated = service.choice(prompt=context, max_tokens=1, logprobs=1)["logprobs"]["top_logprobs"][0]
    best = max(scored["top_logprobs"][cut[0]].values())
    assert best == pytest.approx(max(generated.values()), abs=1e-4)


def test_token_ids_come_back_as_their_text_without_special_tokens(service: Service) -> None:
    tokenizer = service.engine.tokenizer
    prompt = [*tokenizer.encode("<|im_end|>"), *tokenizer.encode(" the and")]
    choice = service.choice(prompt=prompt, max_tokens=0, echo=True, logprobs=0)

    assert choice["text"] == " the and"
    assert choice["logprobs"]["tokens"] == ["<|im_end|>", " the", " and"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 4]


def test_each_of_several_completions_has_the_prompt(service: Service) -> None:
    body = service.body(prompt=TEXT, max_tokens=2, echo=True, logprobs=1, n=2, temperature=1, seed=4)
    first, second = body["choices"]
    length = len(service.engine.tokenizer.encode(TEXT))

    assert first["text"].startswith(TEXT)
    assert second["text"].startswith(TEXT)
    for column in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert first["logprobs"][column][:length] == second["logprobs"][column][:length]
        assert len(second["logprobs"][column]) == length + 2


def test_a_prompt_alone_may_be_as_long_as_the_context(service: Service) -> None:
    prompt = [5] * service.engine.max_model_len
    line = parse(completion_line(prompt=prompt, max_tokens=0, echo=True))

    build_request(service.served.requests, line)
    with pytest.raises(PromptTooLong):
        build_request(service.served.requests, parse(completion_line(prompt=prompt, max_tokens=1, echo=True)))


def test_what_a_tokenizer_puts_before_a_text_takes_no_room_in_it(service: Service) -> None:
    tokenizer: Tokenizer = service.engine.tokenizer
    (mark,) = tokenizer.encode("<|im_start|>")
    offsets = token_offsets(" the<|im_end|>", [mark, *tokenizer.encode(" the<|im_end|>")], tokenizer)

    assert list(offsets) == [0, 0, 4]
