from __future__ import annotations

import base64
import json
import math
import struct
from array import array
from typing import Any

import pytest
from openai.types import CreateEmbeddingResponse

from engine.request import RequestOutput
from tests.support.request_lines import parse, raw_line
from worker.lines.bodies import EmbeddingBody
from worker.records.record import RecordContext, encode_record, has_failed
from worker.records.success import embedding_record

CONTEXT = RecordContext("s0-1", "tiny", created_s=1_700_000_000)
NUMBERS = (0.1, -0.2, 1 / 3, 1e-8, -1.0)
OUTPUT = RequestOutput("3", 7, 0, (), embeddings=(array("f", NUMBERS), array("f", [0.0] * 5)))


def _record(encoding_format: str) -> dict[str, object]:
    line = parse(raw_line({"input": ["a", "b"], "encoding_format": encoding_format, "custom_id": "mine"}), index=3)
    assert isinstance(line.body, EmbeddingBody)
    return embedding_record(line, line.body, OUTPUT, CONTEXT)


def _read(encoding_format: str) -> dict[str, Any]:
    """The record as whoever reads its line has it."""
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
