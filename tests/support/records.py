"""Reading and comparing result records."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.support.thousand_lines import BAD_KINDS, NUM_LINES, bad_line_numbers


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
    """What must be the same however a line was run: not the ids and times, not what the cache saved."""
    failure = error_body(record)
    if failure is not None:
        return (record["custom_id"], failure.get("line"), failure["param"], failure["code"], failure["message"])
    body = record["response"]["body"]
    choices = json.dumps(body["choices"], sort_keys=True)
    return (record["custom_id"], body["object"], choices, body["usage"]["total_tokens"], body["model"])


def essences(records: Iterable[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Records in an order of their own, so that two runs can be compared."""
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
