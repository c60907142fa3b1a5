"""Object storage by a server that checks keys and signatures, and an output of 5 GB: `make test-storage`.

This module is also the program that writes it: `python -m tests.worker.storage.test_seaweed NUM_RECORDS URL`
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, cast

import pytest
from click.testing import CliRunner

from tests.support.object_stores import BUCKET, ObjectStore, seaweed_store
from tests.support.processes import ROOT
from tests.support.registry import TestRegistry, ended_job
from worker.cli.files import RecordPaths
from worker.cli.follow import Followed
from worker.cli.main import cli
from worker.cli.objects import EndedJob
from worker.client import BatchClient
from worker.schemas import JobState, JobStatus, JobUsage, RequestCounts

pytestmark = pytest.mark.storage

RECORD_BYTES = 100_000
NUM_RECORDS = 50_000
PAGE_RECORDS = 10  # as Redis gives them: some 1 MB
# Above a run of 5 MB: parts of 8 MiB that are under way, and what was gathered.
MAX_GROWTH_BYTES = 100_000_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with seaweed_store(tmp_path_factory.mktemp("weed")) as store:
        yield store


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [("AWS_ACCESS_KEY_ID", "AKIAWRONG", "InvalidAccessKeyId"), ("AWS_SECRET_ACCESS_KEY", "x", "SignatureDoesNotMatch")],
)
def test_wrong_credentials_are_told_at_once_and_nothing_is_left(
    server: ObjectStore, redis_url: str, monkeypatch: pytest.MonkeyPatch, name: str, value: str, code: str
) -> None:
    registry = TestRegistry.at(redis_url)
    job_id = ended_job(registry, {})
    for variable, right in server.environment.items():
        monkeypatch.setenv(variable, right)
    monkeypatch.setenv(name, value)
    url = f"s3://{BUCKET}/o.jsonl"

    done = CliRunner().invoke(cli, ["results", job_id, "-o", url, "--redis-url", redis_url])
    listed = CliRunner().invoke(cli, ["submit", f"s3://{BUCKET}/*", "--redis-url", redis_url])

    assert (done.exit_code, listed.exit_code) == (2, 2)
    assert done.stderr.startswith(f"millrace: {url}: access is denied ({code}); accepted, of somebody")
    assert listed.stderr.startswith(f"millrace: s3://{BUCKET}/*: access is denied ({code}); accepted")
    assert (server.keys, server.uploads) == ([], [])


def test_five_gigabytes_of_output_take_bounded_memory(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in server.environment.items():
        monkeypatch.setenv(variable, value)
    peaks = []
    for num_records in (50, NUM_RECORDS):
        url = f"s3://{BUCKET}/of-{num_records}.jsonl"
        command = [sys.executable, "-m", "tests.worker.storage.test_seaweed", str(num_records), url]
        began_s = time.monotonic()
        peak_bytes = int(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)
        print(f"{num_records} records: peak {peak_bytes / 1e6:.0f} MB in {time.monotonic() - began_s:.0f} s")
        peaks.append(peak_bytes)

    size = server.client.head_object(Bucket=BUCKET, Key=f"of-{NUM_RECORDS}.jsonl")["ContentLength"]
    assert size > 5_000_000_000
    assert peaks[1] - peaks[0] < MAX_GROWTH_BYTES
    assert server.uploads == []
    server.clear()


class _Client:
    """Of an ended job whose records are made as they are read: 5 GB of them in Redis would be of no more use here."""

    def __init__(self, status: JobStatus) -> None:
        self._status = status

    def status(self, _job_id: str) -> JobStatus:
        return self._status

    def pages(self, _job_id: str, *, order: str) -> _Pages:
        assert order == "completion"
        return _Pages(self._status.request_counts.total)


class _Pages(Iterator[Iterator[Mapping[str, Any]]]):
    num_rewinds = 0

    def __init__(self, num_records: int) -> None:
        self._left = num_records

    def __next__(self) -> Iterator[Mapping[str, Any]]:
        if not self._left:
            raise StopIteration
        count = min(self._left, PAGE_RECORDS)
        self._left -= count
        return (_record(self._left + index) for index in range(count))


def _record(index: int) -> dict[str, Any]:
    body = {"text": f"{index:08}" * (RECORD_BYTES // 8)}
    return {"custom_id": str(index), "response": {"status_code": 200, "body": body}, "error": None}


def _write(num_records: int, url: str) -> None:
    status = JobStatus(
        id="job-of-a-test",
        status=JobState.COMPLETED,
        created_at=0,
        finished_at=1,
        request_counts=RequestCounts(total=num_records, completed=num_records, failed=0),
        usage=JobUsage(input_tokens=0, cached_tokens=0, output_tokens=0, total_tokens=0),
        shards_total=1,
        shards_done=1,
        priority=5,
        tenant="default",
        metadata={},
    )
    job = Followed(cast(BatchClient, _Client(status)), status.id)
    EndedJob(job, status).write(RecordPaths.of(url))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


if __name__ == "__main__":
    _write(int(sys.argv[1]), sys.argv[2])
