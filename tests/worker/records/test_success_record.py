from __future__ import annotations

import math

from engine.request import Completion, FinishReason, TokenLogprobs
from tests.support.outputs import completion, request_output
from tests.support.request_lines import chat_line, completion_line, parse
from worker.lines.chat import ChatBody
from worker.records.answers import ChatAnswer
from worker.records.record import RecordContext
from worker.records.success import success_record

CONTEXT = RecordContext("s0-1", "tiny", created_s=1_700_000_000)


class Spelling:
    """Token 200 + b is the single byte b, other ids are letters."""

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id - 200]) if token_id >= 200 else bytes([ord("a") + token_id])


def test_a_chat_completion_is_openais_body() -> None:
    line = parse(chat_line(custom_id="mine"), index=3)

    record = success_record(line, request_output("3", completion("hi")), Spelling(), CONTEXT, [ChatAnswer("hi")])

    assert record == {
        "id": "batch_req_s0-1_3",
        "custom_id": "mine",
        "response": {
            "status_code": 200,
            "request_id": "req_s0-1_3",
            "body": {
                "id": "chatcmpl-s0-1-3",
                "object": "chat.completion",
                "created": 1_700_000_000,
                "model": "tiny",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "hi", "refusal": None},
                        "logprobs": None,
                        "finish_reason": "stop",
                        "stop_reason": None,
                    }
                ],
                "usage": {
                    "prompt_tokens": 5,
                    "completion_tokens": 2,
                    "total_tokens": 7,
                    "prompt_tokens_details": {"cached_tokens": 4},
                },
            },
        },
        "error": None,
    }


def choices_of(raw: bytes, *completions: Completion) -> list[dict[str, object]]:
    output = request_output("0", *completions)
    line = parse(raw)
    answers = [ChatAnswer(completion.text) for completion in completions] if isinstance(line.body, ChatBody) else []
    record = success_record(line, output, Spelling(), CONTEXT, answers)
    return record["response"]["body"]["choices"]  # type: ignore[index, no-any-return]  # JSON


def test_a_text_completion_has_text_and_no_message() -> None:
    [choice] = choices_of(completion_line(), completion("hi", finish_reason=FinishReason.LENGTH))

    assert choice == {
        "index": 0, "text": "hi", "logprobs": None, "finish_reason": "length", "stop_reason": None,
    }  # fmt: skip


def test_each_of_n_completions_is_a_choice_and_counts() -> None:
    line = parse(completion_line(n=2))
    output = request_output("0", completion("x"), completion("y", index=1, token_ids=[1, 2, 3]))

    body = success_record(line, output, Spelling(), CONTEXT, [])["response"]["body"]  # type: ignore[index]  # JSON

    assert [choice["text"] for choice in body["choices"]] == ["x", "y"]
    assert body["usage"]["completion_tokens"] == 5
    assert body["usage"]["total_tokens"] == 10


def test_token_ids_are_returned_when_asked_for_only() -> None:
    [asked] = choices_of(completion_line(return_token_ids=True), completion(token_ids=[4, 5]))
    [not_asked] = choices_of(completion_line(), completion(token_ids=[4, 5]))

    assert asked["token_ids"] == [4, 5]
    assert "token_ids" not in not_asked


def test_the_stop_string_or_token_is_told() -> None:
    assert choices_of(completion_line(), completion(stop_reason="###"))[0]["stop_reason"] == "###"
    assert choices_of(completion_line(), completion(stop_reason=9))[0]["stop_reason"] == 9


LOGPROBS = (
    TokenLogprobs(0, -0.5, ((1, -0.1), (0, -0.5))),
    TokenLogprobs(200 + 0xE2, -math.inf, ((1, -0.1), (2, -0.2))),
)


def test_chat_logprobs_have_bytes_and_exactly_the_alternatives_asked_for() -> None:
    [choice] = choices_of(chat_line(logprobs=True, top_logprobs=2), completion(logprobs=LOGPROBS))

    assert choice["logprobs"] == {
        "content": [
            {
                "token": "a", "logprob": -0.5, "bytes": [97],
                "top_logprobs": [
                    {"token": "b", "logprob": -0.1, "bytes": [98]}, {"token": "a", "logprob": -0.5, "bytes": [97]},
                ],
            },
            {
                "token": "\ufffd", "logprob": -9999.0, "bytes": [0xE2],
                "top_logprobs": [
                    {"token": "b", "logprob": -0.1, "bytes": [98]}, {"token": "c", "logprob": -0.2, "bytes": [99]},
                ],
            },
        ],
        "refusal": None,
    }  # fmt: skip


def test_text_logprobs_always_hold_the_chosen_token() -> None:
    [choice] = choices_of(completion_line(logprobs=2), completion(logprobs=LOGPROBS))

    assert choice["logprobs"] == {
        "tokens": ["a", "\ufffd"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{"b": -0.1, "a": -0.5}, {"b": -0.1, "c": -0.2, "\ufffd": -9999.0}],
        "text_offset": [0, 1],
    }


def test_of_two_tokens_with_the_same_text_the_likelier_keeps_the_key() -> None:
    twins = TokenLogprobs(0, -0.1, ((200 + 0xE2, -1.0), (200 + 0xE3, -2.0)))

    [choice] = choices_of(completion_line(logprobs=2), completion(logprobs=[twins]))

    assert choice["logprobs"]["top_logprobs"] == [{"\ufffd": -1.0, "a": -0.1}]  # type: ignore[index]  # JSON
