"""Encodes a record as its line, and holds what all records of one job have in common."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

FLOAT32_FORMAT = ".9"  # digits: enough for every float32 number to come back; a vector takes half of what 17 would
# Where a vector is to stand. Inside a string the quotes would be escaped, and no other key of ours is called so.
_PLACE = '"embedding":[]'


@dataclass(frozen=True, slots=True)
class RecordContext:
    """Which job the records belong to. Ids follow from it, so a record made twice is the same record twice."""

    job_id: str
    model_name: str  # `model` of the response bodies
    created_s: int  # Unix time; the job's, so that a prompt run again gives the same bytes
    labels: tuple[str, ...] = ()  # the names of the model's classes, where it has a head of them

    def record_id(self, index: int) -> str:
        """`id` of the record of line `index` (0-based)."""
        return f"batch_req_{self.job_id}_{index}"

    def answered(self, index: int, custom_id: str | None, status_code: int, body: object) -> dict[str, object]:
        """The record of line `index` (0-based) with a response: OpenAI's result line."""
        return {
            "id": self.record_id(index),
            "custom_id": custom_id,
            "response": {"status_code": status_code, "request_id": f"req_{self.job_id}_{index}", "body": body},
            "error": None,
        }


def encode_record(record: Mapping[str, object]) -> str:
    """One line of JSONL without its line end: ASCII only, no NaN, so that any reader takes it.

    Vectors (`array` of float32 numbers) become lists, written here in 0.4 us a number: rounding each and writing it
    with json took 1.9 us, during 1.1 us of which no other thread could run.
    """
    try:
        return _ENCODER.encode(record)
    except _HasVector:
        return _encode_with_vectors(record)


class _HasVector(Exception):
    """A record holds a vector."""


def _refuse_vector(value: object) -> list[object]:
    if isinstance(value, array):
        raise _HasVector
    raise TypeError(f"a record holds {type(value).__name__}")


_ENCODER = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"), default=_refuse_vector)


def _encode_with_vectors(record: Mapping[str, object]) -> str:
    vectors: list[array[float]] = []

    def place(value: object) -> list[object]:
        if not isinstance(value, array):
            raise TypeError(f"a record holds {type(value).__name__}")
        vectors.append(value)
        return []

    encoder = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"), default=place)
    pieces = encoder.encode(record).split(_PLACE)
    written = [f'"embedding":[{_numbers(vector)}]{piece}' for vector, piece in zip(vectors, pieces[1:], strict=True)]
    return "".join((pieces[0], *written))


def _numbers(vector: array[float]) -> str:
    text = ",".join([format(number, FLOAT32_FORMAT) for number in vector])
    if "n" in text:  # nan, inf
        raise ValueError("Out of range float values are not JSON compliant")
    return text


def has_failed(record: Mapping[str, object]) -> bool:
    """Whether `record` is of a request without an answer."""
    response = record.get("response")
    return not isinstance(response, Mapping) or response.get("status_code") != 200


_TEXT = rb'"(?:[^"\\]|\\.)*"'
# How `answered` begins: up to the status of the response.
_BEGINNING = re.compile(rb'\{"id":%b,"custom_id":(?:null|%b),"response":\{"status_code":(\d+),' % (_TEXT, _TEXT))


class BatchFile(StrEnum):
    """OpenAI's three files of a job: its lines, its answers, and the records without an answer.

    Here all records are one stream in Redis, and each shows which file it belongs to. A file id is only a name, for
    programs that check it; `millrace results JOB -o OUTPUT --errors-file ERRORS` writes both files.
    """

    INPUT = "input"
    OUTPUT = "output"
    ERROR = "error"  # refused, failed, expired and cancelled requests

    @classmethod
    def of_record(cls, record: Mapping[str, object]) -> BatchFile:
        """The file that `record` belongs to."""
        return cls.ERROR if has_failed(record) else cls.OUTPUT

    @classmethod
    def of_raw(cls, record: bytes) -> BatchFile:
        """The file of a record as it is kept: by how it begins, which takes 1 us, or else by all of it."""
        begins = _BEGINNING.match(record)
        if begins is not None:
            return cls.OUTPUT if begins[1] == b"200" else cls.ERROR
        return cls.of_record(json.loads(record))

    def id_of(self, job_id: str) -> str:
        """The file's id: file-<job id>-<input, output or error>."""
        return f"file-{job_id}-{self.value}"
