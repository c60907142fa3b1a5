"""Records of answers, of embeddings and of failures."""

from __future__ import annotations

import base64
import codecs
import json
import math
import struct
from array import array
from typing import Any, cast

import pytest
from openai.types import CreateEmbeddingResponse

from engine.request import Completion, FinishReason, RequestOutput, TokenLogprobs
from engine.text.tokenizer import Tokenizer
from tests.support.fake_engine import completion, request_output
from tests.support.request_lines import chat_line, completion_line, error_of, parse, raw_line
from tests.support.tiny_tokenizer import PIECES, build_sentencepiece_tokenizer
from worker.lines.bodies import EmbeddingBody
from worker.lines.chat import ChatBody
from worker.records.answers import ChatAnswer
from worker.records.failure import Failure, Unfinished, error_record, line_error_record, unfinished_record
from worker.records.record import RecordContext, encode_record, has_failed
from worker.records.success import EchoedPrompt, embedding_record, success_record, text_logprobs

CONTEXT = RecordContext("s0-1", "tiny", created_s=1_700_000_000)

LOGPROBS = (
    TokenLogprobs(0, -0.5, ((1, -0.1), (0, -0.5))),
    TokenLogprobs(200 + 0xE2, -math.inf, ((1, -0.1), (2, -0.2))),
)

NUMBERS = (0.1, -0.2, 1 / 3, 1e-8, -1.0)
OUTPUT = RequestOutput("3", 7, 0, (), embeddings=(array("f", NUMBERS), array("f", [0.0] * 5)))

FAILED_CONTEXT = RecordContext("s0-1", "tiny", created_s=0)


class Spelled:
    """Text as `Spelling`'s tokens make it, of bytes once a character is whole."""

    def __init__(self) -> None:
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")

    def append(self, token_id: int) -> str:
        return self._bytes.decode(Spelling().token_bytes(token_id))


class Spelling:
    """Token 200 + b is the single byte b, other ids are letters."""

    special_token_ids = frozenset[int]()

    def new_detokenizer(self, *, goes_on: bool = False) -> Spelled:
        return Spelled()

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id - 200]) if token_id >= 200 else bytes([ord("a") + token_id])


SPELLING = cast(Tokenizer, Spelling())


def test_a_chat_completion_is_openais_body() -> None:
    line = parse(chat_line(custom_id="mine"), index=3)

    record = success_record(line, request_output("3", completion("hi")), SPELLING, CONTEXT, [ChatAnswer("hi")])

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
    record = success_record(line, output, SPELLING, CONTEXT, answers)
    return record["response"]["body"]["choices"]  # type: ignore[index, no-any-return]  # JSON


def test_a_text_completion_has_text_and_no_message() -> None:
    [choice] = choices_of(completion_line(), completion("hi", finish_reason=FinishReason.LENGTH))

    assert choice == {
        "index": 0, "text": "hi", "logprobs": None, "finish_reason": "length", "stop_reason": None,
    }  # fmt: skip


def test_each_of_n_completions_is_a_choice_and_counts() -> None:
    line = parse(completion_line(n=2))
    output = request_output("0", completion("x"), completion("y", index=1, token_ids=[1, 2, 3]))

    body = success_record(line, output, SPELLING, CONTEXT, [])["response"]["body"]  # type: ignore[index]  # JSON

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


def test_offsets_are_places_in_the_text_for_parts_of_a_character_too() -> None:
    tokens = [TokenLogprobs(token_id, -1.0, ()) for token_id in (*(200 + byte for byte in "日".encode()), 0, 1)]
    line = completion_line(logprobs=0)

    [choice] = choices_of(line, completion("日ab", logprobs=tokens))
    assert choice["logprobs"]["text_offset"] == [0, 0, 0, 1, 2]  # type: ignore[index]  # JSON

    echo = EchoedPrompt("xy", [23, 24], [0, 1], [None, TokenLogprobs(24, -1.0, ())])
    found = text_logprobs(completion("日ab", logprobs=tokens), SPELLING, echo)
    assert found["text_offset"] == [0, 1, 2, 2, 2, 3, 4]


def test_a_completion_that_begins_with_a_space_has_it_in_its_offsets() -> None:
    tokenizer = Tokenizer(build_sentencepiece_tokenizer(), None)
    the, a = (1 + PIECES.index(piece) for piece in ("▁the", "▁a"))
    said = completion(" the a", logprobs=[TokenLogprobs(token_id, -1.0, ()) for token_id in (the, a)])

    found = text_logprobs(said, tokenizer)
    assert (found["tokens"], found["text_offset"]) == ([" the", " a"], [0, 4])


def test_of_two_tokens_with_the_same_text_the_likelier_keeps_the_key() -> None:
    twins = TokenLogprobs(0, -0.1, ((200 + 0xE2, -1.0), (200 + 0xE3, -2.0)))

    [choice] = choices_of(completion_line(logprobs=2), completion(logprobs=[twins]))

    assert choice["logprobs"]["top_logprobs"] == [{"\ufffd": -1.0, "a": -0.1}]  # type: ignore[index]  # JSON


def _record(encoding_format: str) -> dict[str, object]:
    line = parse(raw_line({"input": ["a", "b"], "encoding_format": encoding_format, "custom_id": "mine"}), index=3)
    assert isinstance(line.body, EmbeddingBody)
    return embedding_record(line, line.body, OUTPUT, CONTEXT)


def _read(encoding_format: str) -> dict[str, Any]:
    """The record as a reader of its line gets it."""
    record: dict[str, Any] = json.loads(encode_record(_record(encoding_format)))
    return record


def test_a_record_is_openais_body() -> None:
    record = _read("float")
    body = record["response"].pop("body")
    assert record == {
        "id": "batch_req_s0-1_3",
        "custom_id": "mine",
        "response": {"status_code": 200, "request_id": "req_s0-1_3"},
        "error": None,
    }
    data = body.pop("data")
    assert body == {"object": "list", "model": "tiny", "usage": {"prompt_tokens": 7, "total_tokens": 7}}
    assert [(item["object"], item["index"], len(item["embedding"])) for item in data] == [
        ("embedding", 0, 5), ("embedding", 1, 5)
    ]  # fmt: skip


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
def test_every_float32_number_comes_back(encoding_format: str) -> None:
    found = _read(encoding_format)["response"]["body"]["data"][0]["embedding"]
    if encoding_format == "base64":
        found = struct.unpack("<5f", base64.b64decode(found))
    assert array("f", found) == array("f", NUMBERS)


def test_openais_own_type_takes_the_body() -> None:
    found = CreateEmbeddingResponse.model_validate(_read("float")["response"]["body"], strict=True)
    assert [item.index for item in found.data] == [0, 1]
    assert found.usage.total_tokens == 7


def test_numbers_are_written_with_nine_digits_at_most() -> None:
    line = encode_record(_record("float"))
    assert "[0.100000001,-0.200000003,0.333333343,9.99999994e-09,-1.0]" in line
    assert not has_failed(_record("float"))


def test_no_text_of_a_lines_own_is_taken_for_a_vector() -> None:
    name = '"embedding":[] \\"embedding":[]'
    raw = raw_line({"input": ["a", "b"], "custom_id": name})
    line = parse(raw)
    assert isinstance(line.body, EmbeddingBody)
    record = json.loads(encode_record(embedding_record(line, line.body, OUTPUT, CONTEXT)))
    assert record["custom_id"] == name
    assert [len(item["embedding"]) for item in record["response"]["body"]["data"]] == [5, 5]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_vector_never_holds_what_json_cannot_write(number: float) -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        encode_record({"embedding": array("f", [0.5, number])})


def test_what_is_neither_json_nor_a_vector_is_refused() -> None:
    with pytest.raises(TypeError, match="set"):
        encode_record({"embedding": {1}})


def test_a_bad_line_has_openais_error_body_and_its_line_number() -> None:
    error = error_of(completion_line(custom_id="mine", top_p=2), index=11)

    assert line_error_record(error, FAILED_CONTEXT) == {
        "id": "batch_req_s0-1_11",
        "custom_id": "mine",
        "response": {
            "status_code": 400,
            "request_id": "req_s0-1_11",
            "body": {
                "error": {
                    "message": "top_p is 2; accepted: above 0, at most 1",
                    "type": "invalid_request_error",
                    "param": "top_p",
                    "code": "invalid_value",
                    "line": 12,
                }
            },
        },
        "error": None,
    }


@pytest.mark.parametrize(("may_pass", "status_code"), [(False, 500), (True, 503)])
def test_the_engines_fault_is_a_server_error(may_pass: bool, status_code: int) -> None:
    record = error_record(Failure.of_server("broken", may_pass=may_pass), 0, "a", FAILED_CONTEXT)

    response = record["response"]
    assert isinstance(response, dict)
    assert response["status_code"] == status_code
    assert response["body"]["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    ("reason", "code"), [(Unfinished.CANCELLED, "batch_cancelled"), (Unfinished.EXPIRED, "batch_expired")]
)
def test_an_unfinished_request_has_no_response(reason: Unfinished, code: str) -> None:
    record = unfinished_record(reason, 2, "a", FAILED_CONTEXT)

    assert record["response"] is None
    assert record["error"] == {"code": code, "message": reason.message}
    assert has_failed(record)


def test_a_record_is_one_line_of_ascii() -> None:
    encoded = encode_record({"a": "\n\u2028é\U0001f600"})

    assert encoded.isascii()
    assert "\n" not in encoded
    assert json.loads(encoded) == {"a": "\n\u2028é\U0001f600"}


def test_a_record_never_holds_nan() -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        encode_record({"a": float("nan")})


def test_only_status_200_is_a_success() -> None:
    assert not has_failed({"response": {"status_code": 200}, "error": None})
    assert has_failed({"response": {"status_code": 400}, "error": None})
    assert has_failed({"response": None, "error": {}})
