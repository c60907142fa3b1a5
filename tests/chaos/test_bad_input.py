"""Lines made to break a parser, among innocent ones. Every kind by itself is in tests/worker/lines."""

from __future__ import annotations

import pytest
import redis

from tests.chaos.fleet import Fleet
from tests.chaos.invariants import check_nothing_is_left, check_records
from tests.chaos.jobs import prompts
from tests.chaos.undisturbed import contents, undisturbed
from tests.support.records import error_body
from worker.client import BatchClient

pytestmark = pytest.mark.chaos

BAD_LINES = [
    b'{"custom_id": "surrogate", "prompt": "\\ud83d"}',
    b'{"custom_id": "utf-8", "prompt": "\xff\xfe"}',
    b'{"custom_id": "nan", "prompt": "x", "temperature": NaN}',
    b'{"custom_id": "infinity", "prompt": "x", "temperature": 1e999}',
    b'{"custom_id": "deep", "prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    b'{"custom_id": "twice", "prompt": "x", "prompt": "y"}',
    b'{"custom_id": "n", "prompt": "x", "n": 1000000}',
    b'{"custom_id": "max_tokens", "prompt": "x", "max_tokens": -1}',
    b'{"custom_id": "long", "prompt": "' + b"x" * 5000 + b'"}',
    b'{"custom_id": "huge", "prompt": "' + b"x" * 300_000 + b'"}',
    b"not JSON",
    b"\0\0\0",
]


def test_each_gets_an_error_record_and_the_innocent_get_their_answers(
    client: BatchClient, bare: redis.Redis, fleet: Fleet
) -> None:
    worker = fleet.start()
    good = prompts(40)
    job_id = client.submit([line for pair in zip(good, BAD_LINES * 4, strict=False) for line in pair])
    job = client.wait(job_id, 30)
    assert (job.request_counts.completed, job.request_counts.failed) == (40, 40)
    check_records(client, bare, job_id, num_prompts=80)
    check_nothing_is_left(bare)
    records = list(client.results(job_id))
    answered = contents(record for record in records if error_body(record) is None)
    assert answered == undisturbed(good)
    for record in records:
        body = error_body(record)
        assert body is None or (body["code"] and body["message"])
    assert fleet.stop() == [0]
    assert worker.num_lives == 1
