"""A request's number, offline and in the queue: from 1, blank lines not counted."""

from __future__ import annotations

import io
import json
from typing import Any

from settings import LimitSettings, ModelSettings
from tests.support.fake_engine import FakeEngine
from tests.support.registry import TestRegistry
from tests.support.units import running_units
from worker.client import BatchClient
from worker.lines.files import read_raw_lines
from worker.offline import LineFeed, OfflineRun
from worker.registry.keys import UnitRef

MAX_LINE_BYTES = 1000
FILE = b'\n\n{"prompt": 1}\n   \n{"prompt": "a", "n": 0}\r\n\r\n{bad\n{"prompt": 2, "custom_id": "mine"}'
EXPECTED = [(1, "line-1", "prompt"), (2, "line-2", "n"), (3, None, None), (4, "mine", "prompt")]


def numbered(records: list[dict[str, Any]]) -> list[tuple[int, str | None, str | None]]:
    errors = [(record["response"]["body"]["error"], record["custom_id"]) for record in records]
    return sorted((error["line"], custom_id, error["param"]) for error, custom_id in errors)


def test_offline_counts_requests_and_not_blank_lines() -> None:
    records: list[dict[str, Any]] = []
    engine = FakeEngine()
    run = OfflineRun(engine, ModelSettings(name="m"), window=4, write=lambda record: records.append({**record}))
    raw_lines = read_raw_lines(io.BytesIO(FILE), MAX_LINE_BYTES)
    feed = LineFeed(raw_lines, LimitSettings(), capacity=4, by_prefix=True)
    feed.start()

    run.run(feed, lambda: False, lambda: None)

    assert numbered(records) == EXPECTED


def test_the_queue_counts_as_offline_does(redis_url: str, registry: TestRegistry) -> None:
    with BatchClient(redis_url) as client:
        from_file = client.submit(read_raw_lines(io.BytesIO(FILE), MAX_LINE_BYTES))
        from_list = client.submit(FILE.split(b"\n"))
    with running_units(registry) as units:
        for job_id in (from_file, from_list):
            units.planner().plan(units.hold(UnitRef.plan(job_id)))

            records = [json.loads(record) for record in registry.records(job_id)]
            assert numbered(records) == EXPECTED
