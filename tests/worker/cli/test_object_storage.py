"""Input and output in object storage, by moto's S3 server: what is read, and that an object is there whole or not."""

from __future__ import annotations

import gzip
import io
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.object_stores import (
    BUCKET,
    KEY,
    PASS,
    REFUSE,
    RESET,
    SECRET,
    Gate,
    ObjectStore,
    Seen,
    after_trial,
    held,
    millrace,
    moto_store,
    proxied,
    seaweed_store,
    web_server,
)
from tests.support.registry import TestRegistry, ended_job, must_claim, ok
from tests.support.request_lines import completion_line
from worker.registry.keys import UnitRef

RECORD_BYTES = 1 << 20
NUM_RECORDS = 18  # of three parts

ON_SEAWEED = os.environ.get("TESTED_STORE") == "seaweed"
OUTPUT = f"s3://{BUCKET}/out/o.jsonl"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """moto's; with TESTED_STORE=seaweed that of seaweedfs, as `make test-storage` has it."""
    with seaweed_store(tmp_path_factory.mktemp("weed")) if ON_SEAWEED else moto_store() as store:
        yield store


@pytest.fixture
def store(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    server.clear()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server


def lines(*custom_ids: str) -> bytes:
    return b"".join(completion_line(custom_id=custom_id) + b"\n" for custom_id in custom_ids)


def staged_ids(registry: TestRegistry, printed: str) -> list[str]:
    job_id = printed.strip()
    total = registry.status(job_id).request_counts.total
    return [json.loads(line or b"")["custom_id"] for line in registry.leases().lines(job_id, range(total))]


def large_job(registry: TestRegistry) -> str:
    """An ended job of NUM_RECORDS records of RECORD_BYTES."""
    job_id = registry.running_job(range(NUM_RECORDS))
    leases = registry.leases()
    claim = must_claim(leases, UnitRef.shard(job_id, 0))
    for index in range(NUM_RECORDS):
        body = {"text": f"{index:06}" * (RECORD_BYTES // 6)}
        record = {"custom_id": str(index), "response": {"status_code": 200, "body": body}, "error": None}
        leases.put(claim, [ok(index, json.dumps(record))])
    return job_id


def test_objects_and_patterns_are_one_job_in_the_order_they_are_given(
    store: ObjectStore, registry: TestRegistry
) -> None:
    last = store.put("in/a-last.jsonl", lines("5"))
    store.put("in/day-2.jsonl.gz", gzip.compress(lines("3", "4")))
    store.put("in/day-1.jsonl", lines("1", "2"))
    store.put("in/.day-3.jsonl", lines("hidden"))
    store.put("in/deep/day-4.jsonl", lines("deep"))

    done = millrace(registry, "submit", f"s3://{BUCKET}/in/day-*", last)
    deep = millrace(registry, "submit", f"s3://{BUCKET}/**/day-[14].jsonl")

    assert staged_ids(registry, done.stdout) == ["1", "2", "3", "4", "5"]
    assert staged_ids(registry, deep.stdout) == ["1", "2", "deep"]


def test_a_key_that_looks_like_a_pattern_is_that_key(store: ObjectStore, registry: TestRegistry) -> None:
    name = store.put("in/[a] ü%41#?*.jsonl", lines("1"))
    store.put("in/a b.jsonl", lines("2"))

    assert staged_ids(registry, millrace(registry, "submit", name).stdout) == ["1"]


def test_an_object_of_many_ranges_is_read_whole_and_by_one_version(store: ObjectStore, registry: TestRegistry) -> None:
    from worker.storage.objects import find_objects
    from worker.storage.urls import object_url

    data = b"".join(b"%07d\n" % number for number in range(120_000))
    name = store.put("large.jsonl", data)
    [found] = find_objects(object_url(name))

    with found.open() as file:
        assert isinstance(file, io.BufferedReader)
        assert file.read() == data
    with found.open() as file:
        file.read(10)
        store.put("large.jsonl", data.replace(b"0", b"1"))
        with pytest.raises(OSError, match="replaced while it was read"):
            file.read()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (f"s3://{BUCKET}/none.jsonl", f"s3://{BUCKET}/none.jsonl: there is no such object"),
        (f"s3://{BUCKET}/none-*", f"s3://{BUCKET}/none-*: no object has such a name"),
        (f"s3://{BUCKET}/in/", "it is a folder; accepted: an object, or a pattern such as"),
        ("s3://no-such-bucket/in/*", "s3://no-such-bucket/in/*: there is no such bucket"),
        ("ftp://host/file", "accepted: s3://BUCKET/KEY"),
        ("s3:///key", "it names no bucket; accepted: s3://BUCKET/KEY"),
        (f"s3://{BUCKET}/a//b", "accepted: keys without empty parts"),
        ("file://host/path", "accepted: file:///PATH"),
        ("https://user:hidden@host/path", "accepted: a URL without user and password"),
        (f"s3://{BUCKET}/table.csv", "it is a table (CSV); accepted: request lines (JSONL)"),
        (f"s3://{BUCKET}/torn.gz", "its gzip data is broken"),
    ],
)
def test_what_cannot_be_read_is_exit_2_and_nothing_is_submitted(
    store: ObjectStore, registry: TestRegistry, name: str, told: str
) -> None:
    store.put("table.csv", b"a,b,c\n1,2,3\n")
    store.put("torn.gz", gzip.compress(lines(*map(str, range(5000))))[:-20])
    good = store.put("good.jsonl", lines("1"))

    done = millrace(registry, "submit", good, name, exit_code=2)

    assert told in done.stderr
    assert "hidden" not in done.output
    assert registry.jobs() == []


LONG_IDS = [f"{number:040}" for number in range(4000)]


def test_a_file_of_a_web_server_is_read_and_its_signature_not_shown(registry: TestRegistry) -> None:
    with web_server(lines(*LONG_IDS), secret="hidden") as url:
        done = millrace(registry, "submit", f"{url}?signature=hidden")
        denied = millrace(registry, "submit", f"{url}?signature=hiddex", exit_code=2)

    assert staged_ids(registry, done.stdout) == LONG_IDS
    told = f"millrace: {url}?...: access is denied; accepted, of somebody who may do this: a URL that is signed"
    assert denied.stderr.startswith(told)
    assert "hidde" not in done.output + denied.output


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    store: ObjectStore, registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)

    done = millrace(registry, "submit", f"s3://{BUCKET}/a.jsonl", exit_code=2)

    assert 'the extra storage, which is not installed: pip install "obstore' in done.stderr


def test_a_file_url_is_a_path(registry: TestRegistry, tmp_path: Path) -> None:
    (tmp_path / "a b.jsonl").write_bytes(lines("1"))
    job_id = ended_job(registry, {})

    done = millrace(registry, "submit", f"{tmp_path.as_uri()}/a%20*.jsonl")
    millrace(registry, "results", job_id, "-o", f"{tmp_path.as_uri()}/o.jsonl")

    assert staged_ids(registry, done.stdout) == ["1"]
    assert len((tmp_path / "o.jsonl").read_bytes().splitlines()) == 6


def test_results_are_an_object_for_the_answers_and_one_for_the_errors(
    store: ObjectStore, registry: TestRegistry, tmp_path: Path
) -> None:
    job_id = ended_job(registry, {2: (None, "invalid_json_line"), 4: ("b", "duplicate_custom_id")})
    millrace(registry, "results", job_id, "-o", f"{tmp_path}/")

    millrace(registry, "results", job_id, "-o", f"s3://{BUCKET}/out/")
    millrace(registry, "results", job_id, "--follow", "-o", f"s3://{BUCKET}/one.jsonl.gz")

    assert store.get("out/output.jsonl") == (tmp_path / "output.jsonl").read_bytes()
    assert store.get("out/errors.jsonl") == (tmp_path / "errors.jsonl").read_bytes()
    assert len(gzip.decompress(store.get("one.jsonl.gz")).splitlines()) == 6
    assert store.uploads == []


def test_an_object_of_the_job_is_left_as_it_is(store: ObjectStore, registry: TestRegistry) -> None:
    first, second = (ended_job(registry, {index: ("b", "internal_error")}) for index in (1, 3))
    millrace(registry, "results", first, "-o", OUTPUT)
    written = store.client.head_object(Bucket=BUCKET, Key="out/o.jsonl")

    again = millrace(registry, "results", first, "-o", OUTPUT)
    same = store.client.head_object(Bucket=BUCKET, Key="out/o.jsonl")
    millrace(registry, "results", second, "-o", OUTPUT)

    assert "it is left as it is" in again.stderr
    assert same["LastModified"] == written["LastModified"]
    assert store.metadata("out/o.jsonl")["millracejob"] == second


def test_an_object_is_of_an_ended_job(store: ObjectStore, registry: TestRegistry) -> None:
    job_id = registry.running_job(range(3))

    refused = millrace(registry, "results", job_id, "-o", OUTPUT, exit_code=2)
    cursor = millrace(registry, "results", job_id, "--cursor", "1", "-o", OUTPUT, exit_code=2)
    mixed = millrace(registry, "results", job_id, "-o", OUTPUT, "--errors-file", "e.jsonl", exit_code=2)
    web = millrace(registry, "results", job_id, "-o", "https://host/o.jsonl", exit_code=2)

    assert "accepted: --follow" in refused.stderr
    assert "--cursor: an object holds all records" in cursor.stderr
    assert "an object beside an object" in mixed.stderr
    assert "accepted for output: s3://" in web.stderr
    assert (store.keys, store.uploads) == ([], [])


@pytest.mark.skipif(ON_SEAWEED, reason="it makes a bucket that is not there")
def test_a_job_whose_results_cannot_be_written_is_not_submitted(store: ObjectStore, registry: TestRegistry) -> None:
    good = store.put("good.jsonl", lines("1"))

    done = millrace(registry, "submit", good, "-o", "s3://no-such-bucket/out/", exit_code=2)

    assert "s3://no-such-bucket/out/output.jsonl: there is no such bucket" in done.stderr
    assert registry.jobs() == []


def test_an_output_that_is_the_input_is_refused(store: ObjectStore, registry: TestRegistry) -> None:
    good = store.put("good.jsonl", lines("1"))

    same = millrace(registry, "submit", good, "-o", good, exit_code=2)

    assert f"{good} is also the input" in same.stderr
    assert registry.jobs() == []


@pytest.mark.parametrize("failing", ["part", "complete"])
def test_an_upload_outlives_503s_and_resets(
    store: ObjectStore, registry: TestRegistry, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    job_id = large_job(registry)
    tries: dict[str, int] = {}
    picks = after_trial(lambda seen: seen.part == 2 if failing == "part" else seen.completes)

    def rule(seen: Seen) -> str:
        if not picks(seen):
            return PASS
        tries[failing] = tries.get(failing, 0) + 1
        return {1: REFUSE, 2: RESET}.get(tries[failing], PASS)

    with proxied(store, rule) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        millrace(registry, "results", job_id, "-o", OUTPUT)

    assert tries[failing] == 3
    assert len(store.get("out/o.jsonl").splitlines()) == NUM_RECORDS
    assert store.uploads == []


def test_an_input_outlives_503s_and_resets(
    store: ObjectStore, registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = store.put("in.jsonl", lines(*LONG_IDS))
    seen_reads: list[str] = []

    def rule(seen: Seen) -> str:
        if not seen.reads:
            return PASS
        seen_reads.append(seen.target)
        return {2: REFUSE, 4: RESET, 5: RESET}.get(len(seen_reads), PASS)

    with proxied(store, rule) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        done = millrace(registry, "submit", name)

    assert len(seen_reads) > 5
    assert staged_ids(registry, done.stdout) == LONG_IDS


def test_killed_in_any_part_the_object_is_there_whole_or_not_at_all(
    store: ObjectStore, registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = large_job(registry)
    for part in (1, 2, 3):

        def picks(seen: Seen, first: int = part) -> bool:
            return (seen.part or (3 if seen.completes else 0)) >= first

        gate = Gate(after_trial(picks), RESET)
        with held(store, registry, monkeypatch, gate, "results", job_id, "-o", OUTPUT) as (process, _):
            process.kill()
            assert process.wait(30) == -signal.SIGKILL
            gate.released.set()
        assert store.keys == []
    assert store.uploads == ["out/o.jsonl"] * 3  # which a rule of the bucket clears away

    monkeypatch.setenv("AWS_ENDPOINT_URL", store.url)
    millrace(registry, "results", job_id, "-o", OUTPUT)

    found = [json.loads(line)["custom_id"] for line in store.get("out/o.jsonl").splitlines()]
    assert found == list(map(str, range(NUM_RECORDS)))
    assert len(store.uploads) == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_upload_leaves_nothing(
    store: ObjectStore, registry: TestRegistry, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    job_id = large_job(registry)
    gate = Gate(after_trial(lambda seen: seen.part == 1))

    with held(store, registry, monkeypatch, gate, "results", job_id, "-o", OUTPUT) as (process, output):
        process.send_signal(number)
        gate.released.set()
        code = process.wait(300)
        output.seek(0)
        told = output.read().decode()

    assert code == 130, told
    assert "nothing is written" in told
    assert f"-o {OUTPUT}" in told
    assert (store.keys, store.uploads) == ([], [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", ["results", "submit"])
def test_a_stopped_trial_of_an_output_leaves_nothing(
    store: ObjectStore, registry: TestRegistry, monkeypatch: pytest.MonkeyPatch, command: str, number: signal.Signals
) -> None:
    good = store.put("good.jsonl", lines("1"))
    jobs = [] if command == "submit" else [ended_job(registry, {})]
    gate = Gate(lambda seen: seen.begins)

    with held(store, registry, monkeypatch, gate, command, *(jobs or [good]), "-o", OUTPUT) as (process, output):
        process.send_signal(number)
        gate.released.set()
        code = process.wait(300)
        output.seek(0)
        told = output.read().decode()

    assert (code, told) == (130, f"millrace: interrupted; nothing is written to {OUTPUT}\n")
    assert (store.keys, store.uploads) == (["good.jsonl"], [])
    assert [job.id for job in registry.jobs()] == jobs


def test_of_two_writers_both_leave_the_same_bytes(
    store: ObjectStore, registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = large_job(registry)
    gate = Gate(lambda seen: seen.completes)

    with held(store, registry, monkeypatch, gate, "results", job_id, "-o", OUTPUT) as (slow, _):
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.url)
        millrace(registry, "results", job_id, "-o", OUTPUT)
        first = store.get("out/o.jsonl")
        gate.released.set()
        assert slow.wait(300) == 0

    assert store.get("out/o.jsonl") == first
    assert store.uploads == []


def test_a_lost_reply_to_the_last_request_is_no_failure(
    store: ObjectStore, registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = large_job(registry)
    completed: list[str] = []

    def rule(seen: Seen) -> str:
        if seen.completes:
            if not completed:
                completed.append(seen.target)
                upload_id = seen.target.partition("uploadId=")[2]
                found = store.client.list_parts(Bucket=BUCKET, Key="out/o.jsonl", UploadId=upload_id)["Parts"]
                parts = [{"PartNumber": part["PartNumber"], "ETag": part["ETag"]} for part in found]
                written = {"Parts": parts}
                store.client.complete_multipart_upload(
                    Bucket=BUCKET, Key="out/o.jsonl", UploadId=upload_id, MultipartUpload=written
                )
            return RESET
        return PASS

    with proxied(store, rule) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        monkeypatch.setattr("worker.storage.stores.MAX_RETRIES", 2)
        millrace(registry, "results", job_id, "-o", OUTPUT)

    assert completed
    assert len(store.get("out/o.jsonl").splitlines()) == NUM_RECORDS


def test_credentials_of_a_profile_are_found_and_stand_nowhere(
    store: ObjectStore,
    registry: TestRegistry,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name)
    (tmp_path / "credentials").write_text(f"[p]\naws_access_key_id={KEY}\naws_secret_access_key={SECRET}\n")
    (tmp_path / "config").write_text(f"[profile p]\nregion=us-east-1\nendpoint_url={store.url}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    name = store.put("in.jsonl", lines("1"))

    caplog.set_level(logging.DEBUG)
    none = millrace(registry, "submit", name, exit_code=2)
    monkeypatch.setenv("AWS_PROFILE", "p")
    done = millrace(registry, "submit", name, "--set", "log.level=debug")
    millrace(registry, "results", ended_job(registry, {}), "-o", OUTPUT)

    assert not [record for record in caplog.records if record.name.startswith("botocore")]
    assert "no credentials were found; accepted: AWS_ACCESS_KEY_ID" in none.stderr
    assert len(staged_ids(registry, done.stdout)) == 1
    registry.redis.config_set("rdbcompression", "no")
    dump = b"".join(registry.redis.dump(key) or b"" for key in registry.redis.keys("*"))
    for secret in (SECRET, KEY):
        assert secret.encode() not in dump
        assert secret not in caplog.text + done.output
