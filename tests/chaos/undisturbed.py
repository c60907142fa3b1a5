"""What the records of a job are when nothing goes wrong."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from typing import Any

from settings import LimitSettings, ModelSettings
from tests.support.fake_engine import FakeEngine
from worker.offline import LineFeed, OfflineRun

Record = dict[str, Any]
WINDOW = 64


def content(record: Mapping[str, Any]) -> Record:
    """The record without what belongs to its job or its moment: ids, time of creation, tokens the cache saved."""
    kept = copy.deepcopy(dict(record))
    del kept["id"]
    response = kept["response"]
    if response is not None:
        del response["request_id"]
        body = response["body"]
        for name in ("id", "created"):
            body.pop(name, None)
        if "usage" in body:
            body["usage"].pop("prompt_tokens_details")
    return kept


def contents(records: Iterable[Mapping[str, Any]]) -> dict[str, Record]:
    """Content by custom_id; two records of one prompt are a failure."""
    found: dict[str, Record] = {}
    for record in records:
        assert record["custom_id"] not in found, f"two records of {record['custom_id']}"
        found[record["custom_id"]] = content(record)
    return found


def undisturbed(lines: Iterable[Mapping[str, Any]]) -> dict[str, Record]:
    """The contents of an offline run of these lines with the fake engine, in this process."""
    records: list[Mapping[str, Any]] = []
    run = OfflineRun(FakeEngine(), ModelSettings(), window=WINDOW, write=records.append)
    raw_lines = [json.dumps(line).encode() for line in lines]
    feed = LineFeed(raw_lines, LimitSettings(), capacity=WINDOW, by_prefix=True)
    feed.start()
    run.run(feed, _never, lambda: None)
    return contents(records)


def _never() -> bool:
    return False
