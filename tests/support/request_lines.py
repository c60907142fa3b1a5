"""Makes request lines and reads the records that answer them, among them a file of 1,000 lines of which 20 are bad in
10 ways, and the demo's tickets, whose right answers are known: wrong bytes anywhere show as wrong answers. And the
status of a job of such lines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from engine.engine import Engine
from engine.request import AnyRequest
from settings import LimitSettings, ModelSettings
from worker.demo.run import CHECKPOINT, GOAL
from worker.demo.tickets import Ticket, demo_lines
from worker.lines.bodies import CompletionBody
from worker.lines.chat import ChatBody
from worker.lines.errors import LineError
from worker.lines.parse import parse_request_line
from worker.lines.request_line import GeneratingBody, RequestLine
from worker.offline import LineFeed, OfflineRun
from worker.requests.builder import RequestBuilder
from worker.schemas import JobState, JobStatus, JobUsage, RequestCounts

__all__ = ["CHECKPOINT", "GOAL", "ticket_lines", "run_lines"]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

NUM_LINES = 1000
MAX_TOKENS = 4
SYSTEM_PROMPTS = tuple(f"You are assistant number {i} and you answer the user. " * 3 for i in range(5))

# Kind of bad line -> (the field its error must name, how it is written for a custom_id).
BAD_KINDS: dict[str, tuple[str | None, Callable[[str], str]]] = {
    "bad JSON": (None, '{{"custom_id": "{}", "body": {{"prompt": "x"'.format),
    "duplicate custom_id": ("custom_id", lambda name: _line("line-0", prompt="again")),
    "unknown parameter": ("temprature", lambda name: _line(name, prompt="x", temprature=1)),
    "wrong type": ("max_tokens", lambda name: _line(name, prompt="x", max_tokens="many")),
    "prompt longer than the context": ("prompt", lambda name: _line(name, prompt=[1] * 2000)),
    "empty prompt": ("prompt", lambda name: _line(name, prompt="")),
    "token id out of range": ("prompt", lambda name: _line(name, prompt=[1, 2, 100000])),
    "unknown url": ("url", lambda name: _line(name, url="/v1/poems", prompt="x")),
    "lone surrogate": ("prompt", lambda name: _line(name, prompt="half a pair: \ud83d")),
    "NaN temperature": ("temperature", lambda name: _line(name, prompt="x", temperature=float("nan"))),
}


def raw_line(value: object) -> bytes:
    """`value` as the bytes of a line; NaN and lone surrogates pass, as they do from careless producers."""
    return json.dumps(value).encode("utf-8")


def batch_line(url: str, body: object, **envelope: object) -> bytes:
    """An OpenAI Batch line; `envelope` replaces or adds fields beside `body`."""
    return raw_line({"custom_id": "a", "method": "POST", "url": url, "body": body, **envelope})


def completion_line(**parameters: object) -> bytes:
    """A shorthand completion line."""
    return raw_line({"prompt": "hello", **parameters})


def chat_line(**parameters: object) -> bytes:
    """A shorthand chat line."""
    return raw_line({"messages": [{"role": "user", "content": "hello"}], **parameters})


def parse(raw: bytes, index: int = 0) -> RequestLine:
    """The line as parsed under the default limits."""
    return parse_request_line(raw, index, LimitSettings())


def body_of(raw: bytes) -> GeneratingBody:
    """The body of a line that generates."""
    body = parse(raw).body
    assert isinstance(body, CompletionBody | ChatBody)
    return body


def error_of(raw: bytes, index: int = 0) -> LineError:
    """The error of a line that must be refused."""
    try:
        line = parse(raw, index)
    except LineError as error:
        return error
    raise AssertionError(f"accepted: {line}")


def build_request(
    builder: RequestBuilder, line: RequestLine, request_id: str = "r", *, created_s: int = 0, tenant: str = ""
) -> AnyRequest:
    """The engine's request for `line`. Raises what is wrong with it."""
    [request] = builder.build_all([(line, request_id)], created_s=created_s, tenant=tenant)
    if isinstance(request, Exception):
        raise request
    return request


def _line(custom_id: str, *, url: str = "/v1/completions", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def _good_line(number: int) -> str:
    options: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 0}
    system = SYSTEM_PROMPTS[number % len(SYSTEM_PROMPTS)]
    if number % 2:
        return _line(f"line-{number}", prompt=f"{system}Question no. {number}?", return_token_ids=True, **options)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"Question no. {number}?"}]
    return _line(f"line-{number}", url="/v1/chat/completions", messages=messages, **options)


def bad_line_numbers() -> dict[int, str]:
    """Line number (from 0) -> kind: every kind twice, spread over the file."""
    kinds = list(BAD_KINDS)
    return {25 + 50 * index: kinds[index % len(kinds)] for index in range(2 * len(kinds))}


def thousand_lines() -> list[str]:
    """The lines of the file of 1,000.

    Asked "Question 415?" the tiny model's two best logits lie 3.5e-6 apart, which the order of a sum decides; with
    these words none of the texts' lie nearer than 1.4e-3.
    """
    bad = bad_line_numbers()
    return [
        BAD_KINDS[bad[number]][1](f"line-{number}") if number in bad else _good_line(number)
        for number in range(NUM_LINES)
    ]


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a results file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def error_body(record: dict[str, Any]) -> dict[str, Any] | None:
    """The error of a record, None for a result."""
    response = record["response"]
    if response is None:
        return dict(record["error"])
    failure: dict[str, Any] | None = response["body"].get("error")
    return failure


def essence(record: dict[str, Any]) -> tuple[Any, ...]:
    """What of a record must be the same however its line was run: no ids, no times, no tokens that the cache saved."""
    failure = error_body(record)
    if failure is not None:
        return (record["custom_id"], failure.get("line"), failure["param"], failure["code"], failure["message"])
    body = record["response"]["body"]
    choices = json.dumps(body["choices"], sort_keys=True)
    return (record["custom_id"], body["object"], choices, body["usage"]["total_tokens"], body["model"])


def essences(records: Iterable[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """The essences of records, sorted, so that two runs can be compared."""
    return sorted((essence(record) for record in records), key=repr)


def check_thousand_records(records: list[dict[str, Any]]) -> None:
    """980 results and 20 errors that name line and field, one record a line."""
    assert len(records) == NUM_LINES
    failures = {body["line"]: body for record in records if (body := error_body(record)) is not None}
    bad = bad_line_numbers()
    assert sorted(failures) == [number + 1 for number in sorted(bad)]
    for number, kind in bad.items():
        found = failures[number + 1]
        assert found["param"] == BAD_KINDS[kind][0], (kind, found)
        assert found["code"], (kind, found)
    results = [record for record in records if error_body(record) is None]
    assert len(results) == NUM_LINES - len(bad)
    assert len({record["custom_id"] for record in results}) == len(results)
    assert all(record["response"]["status_code"] == 200 for record in results)


def job_status(
    status: JobState, completed: int = 0, failed: int = 0, error: str | None = None, *, output_tokens: int = 7
) -> JobStatus:
    """The status of a job of ten prompts; a quarter of their tokens came from the prefix cache."""
    return JobStatus(
        id="s0-1",
        status=status,
        created_at=0.0,
        request_counts=RequestCounts(total=10, completed=completed, failed=failed),
        usage=JobUsage(
            input_tokens=100, cached_tokens=25, output_tokens=output_tokens, total_tokens=100 + output_tokens
        ),
        shards_total=1,
        shards_done=0,
        priority=5,
        tenant="default",
        metadata={},
        error=error,
    )


def ticket_lines(tickets: Mapping[str, Ticket], *, by_schema: bool = True) -> list[dict[str, Any]]:
    """The demo's lines for these tickets; without the schema nothing holds the model to JSON."""
    lines: list[dict[str, Any]] = list(demo_lines(tickets))
    if not by_schema:
        for line in lines:
            del line["body"]["response_format"]
    return lines


def run_lines(engine: Engine, lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The records of these lines, as `millrace run` makes them, in this process."""
    records: list[Mapping[str, Any]] = []
    run = OfflineRun(engine, ModelSettings(name=CHECKPOINT.name), window=64, write=records.append)
    feed = LineFeed([json.dumps(line).encode() for line in lines], LimitSettings(), capacity=64, by_prefix=True)
    feed.start()
    run.run(feed, lambda: False, lambda: None)
    return records
