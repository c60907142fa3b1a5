"""What a Redis must be before jobs are trusted to it, and how far it must have taken them."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner

from settings import SettingsError
from tests.chaos.faults import FileHistory
from tests.support.processes import redis_executables, server_version, wait_until
from tests.support.redis_servers import RestartableRedis, configured, redis_settings
from tests.support.workers import worker_processes
from worker.async_client import AsyncBatchClient
from worker.cli.main import cli
from worker.client import BatchClient
from worker.registry.errors import JobReused, NotDurable, RedisFull
from worker.registry.trust import AppendOnlyFile, has_renewed
from worker.schemas import JobState

LINES = [b'{"prompt": "a"}']
EVICTING = {"maxmemory": "100mb", "maxmemory_policy": "allkeys-lru"}
EXECUTABLES = redis_executables()
WITH_WAITAOF = {name: path for name, path in EXECUTABLES.items() if server_version(path) >= (7, 2)}
WORKER_END_S = 60.0


@pytest.fixture
def evicting(redis_url: str) -> Iterator[str]:
    with configured(redis_url, **EVICTING):
        yield redis_url


@contextmanager
def kept(
    directory: Path, executable: str = "", *, is_durable: bool = True, **options: object
) -> Iterator[RestartableRedis]:
    """A server that may have an append-only file."""
    directory.mkdir(exist_ok=True)
    server = RestartableRedis(directory, is_durable=is_durable, executable=executable, options=options)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def replicated(primary: RestartableRedis, directory: Path) -> Iterator[str]:
    """The URL of a replica that has all that there is."""
    with kept(directory) as replica, redis.Redis.from_url(primary.url) as first:
        with redis.Redis.from_url(replica.url) as second:
            second.replicaof("127.0.0.1", primary.port)
        wait_until(lambda: first.info("replication").get("slave0", {}).get("state") == "online")
        yield replica.url


def test_a_submit_to_a_redis_that_drops_jobs_is_refused(evicting: str) -> None:
    with BatchClient(evicting) as client:
        with pytest.raises(SettingsError) as caught:
            client.submit(LINES)
        assert client.jobs() == []
    assert str(caught.value) == (
        "Redis's maxmemory-policy=allkeys-lru: a full Redis drops jobs and results; accepted: noeviction "
        "(redis-cli CONFIG SET maxmemory-policy noeviction), or redis.allow_unsafe=true"
    )


def test_so_is_one_in_an_event_loop_and_one_of_the_command(evicting: str, tmp_path: Path) -> None:
    async def submit() -> None:
        async with AsyncBatchClient(evicting) as client:
            await client.submit(LINES)

    with pytest.raises(SettingsError, match="allkeys-lru"):
        asyncio.run(submit())
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps({"prompt": "a"}))
    done = CliRunner().invoke(cli, ["submit", str(lines), "--redis-url", evicting])
    assert (done.exit_code, "maxmemory-policy=allkeys-lru" in done.stderr) == (2, True)


def test_a_worker_does_not_start_on_one(evicting: str, tmp_path: Path) -> None:
    with worker_processes(evicting, tmp_path) as workers:
        assert workers.start().wait(WORKER_END_S) != 0
        assert "maxmemory-policy=allkeys-lru" in workers.log()


def test_allow_unsafe_goes_on_in_spite_of_it(evicting: str, caplog: pytest.LogCaptureFixture) -> None:
    with BatchClient(redis_settings(evicting, allow_unsafe=True)) as client:
        job_id = client.submit(LINES)
        assert client.status(job_id).status is JobState.VALIDATING
    assert not caplog.records


def test_where_nothing_is_ever_evicted_it_is_a_warning(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    with configured(redis_url, maxmemory_policy="allkeys-lru"), BatchClient(redis_url) as client:
        client.submit(LINES)
    assert "Redis's maxmemory-policy is allkeys-lru: with a maxmemory it would drop jobs" in caplog.messages


@pytest.mark.parametrize(
    ("is_durable", "expected"),
    [
        (True, []),
        (False, ["Redis keeps no append-only file: when it ends it loses all jobs and results "
                 "(redis.allow_unsafe=true says it may)"]),
    ],
)  # fmt: skip
def test_a_redis_that_keeps_nothing_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_durable: bool, expected: list[str]
) -> None:
    with kept(tmp_path, is_durable=is_durable) as server, BatchClient(server.url) as client:
        client.submit(LINES)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == expected


def test_a_client_asks_once_and_not_for_each_job(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as other, BatchClient(redis_url) as client:
        client.submit(LINES)
        before = _num_asked(other)
        client.submit(LINES)
        assert _num_asked(other) == before + 1  # by `_num_asked` itself


def _num_asked(client: redis.Redis) -> int:
    return int(client.info("commandstats")["cmdstat_info"]["calls"]) + 1


def test_ack_of_a_disk_needs_a_redis_that_can_say_so(tmp_path: Path) -> None:
    for name, path in EXECUTABLES.items():
        lacking = "no append-only file" if name in WITH_WAITAOF else f"Redis {name} cannot say"
        with kept(tmp_path / name, path, is_durable=False) as server, _acked(server, "disk") as client:
            with pytest.raises(SettingsError, match=rf"^redis\.ack=disk: .*{lacking}"):
                client.submit(LINES)
            with pytest.raises(SettingsError, match=rf"^redis\.ack=disk: .*{lacking}"):
                client.cancel("s0-x")
            assert client.jobs() == []


@pytest.mark.parametrize("executable", WITH_WAITAOF.values(), ids=WITH_WAITAOF)
def test_ack_of_a_disk_waits_for_it(tmp_path: Path, executable: str) -> None:
    with kept(tmp_path, executable, appendfsync="always") as server, _acked(server, "disk") as client:
        job_id = client.submit(LINES, idempotency_key="a")
        assert client.submit(LINES, idempotency_key="a") == job_id
        assert client.cancel(job_id).status is JobState.CANCELLED


@pytest.mark.parametrize("executable", WITH_WAITAOF.values(), ids=WITH_WAITAOF)
def test_a_disk_that_does_not_confirm_is_an_error_with_the_job(tmp_path: Path, executable: str) -> None:
    # It leaves that to the kernel, and never says so.
    with kept(tmp_path, executable, appendfsync="no") as server, _acked(server, "disk", 0.5) as client:
        for _ in range(2):  # nor the second time, when the job is known and its connection has written nothing for it
            with _acked(server, "disk", 0.5) as other, pytest.raises(NotDurable) as caught:
                other.submit(LINES, idempotency_key="a")
            job_id = caught.value.job_id
            assert [job.id for job in client.jobs()] == [job_id]
        assert str(caught.value) == (
            f"job {job_id} is accepted, but not known to be durable: Redis did not confirm within 0.25 s that it "
            "is on Redis's disk (redis.ack=disk)"
        )
        with pytest.raises(NotDurable, match=f"job {job_id} is cancelled, but not"):
            client.cancel(job_id)


@pytest.mark.parametrize("executable", WITH_WAITAOF.values(), ids=WITH_WAITAOF)
def test_a_job_is_cancelled_on_the_disk_of_a_full_redis(tmp_path: Path, executable: str) -> None:
    with kept(tmp_path, executable, appendfsync="always") as server, _acked(server, "disk") as client:
        job_id = client.submit(LINES)
        with configured(server.url, maxmemory="1"):
            assert client.cancel(job_id).status is JobState.CANCELLED


@pytest.mark.parametrize("has_functions", [True, False])
@pytest.mark.parametrize("executable", EXECUTABLES.values(), ids=EXECUTABLES)
def test_a_full_redis_is_read_and_emptied(tmp_path: Path, executable: str, has_functions: bool) -> None:
    with kept(tmp_path, executable) as server, redis.Redis.from_url(server.url) as other:
        with BatchClient(server.url) as client:
            job_id = client.submit(LINES)
        if not has_functions and server_version(executable) >= (7, 0):
            other.function_flush()  # as of another version, which has other functions
        with configured(server.url, maxmemory="1"), BatchClient(server.url) as client:
            client.cancel(job_id)
            assert [record["error"]["code"] for record in client.results(job_id)] == ["batch_cancelled"]
            client.delete(job_id)
        assert client.jobs() == []


@pytest.mark.parametrize("executable", EXECUTABLES.values(), ids=EXECUTABLES)
def test_a_full_redis_knows_a_job_that_is_submitted_again(tmp_path: Path, executable: str) -> None:
    with kept(tmp_path, executable) as server, BatchClient(server.url) as client:
        job_id = client.submit(LINES, idempotency_key="a")
        with configured(server.url, maxmemory="1"):
            assert client.submit(LINES, job_id=job_id) == job_id
            assert client.submit(LINES, idempotency_key="a") == job_id
            with pytest.raises(JobReused, match=f"idempotency_key 'a' is of job {job_id}, which has other lines"):
                client.submit([*LINES, b"{}"], idempotency_key="a")
            with pytest.raises(RedisFull, match="nothing was submitted"):
                client.submit(LINES, idempotency_key="b")
        assert [job.id for job in client.jobs()] == [job_id]


@pytest.mark.parametrize("executable", EXECUTABLES.values(), ids=EXECUTABLES)
def test_a_job_that_has_filled_redis_is_that_of_whoever_comes_later(tmp_path: Path, executable: str) -> None:
    with kept(tmp_path, executable) as server, BatchClient(server.url) as client, BatchClient(server.url) as first:
        with redis.Redis.from_url(server.url) as admin:

            def lines() -> Iterator[bytes]:
                jobs.append(first.submit(LINES, idempotency_key="a"))
                admin.config_set("maxmemory", 1)
                yield from LINES

            jobs: list[str] = []
            assert client.submit(lines(), idempotency_key="a") == jobs[0]
        assert [job.id for job in client.jobs()] == jobs


def test_a_replica_tells_how_a_job_stands_whose_deadline_has_passed(tmp_path: Path) -> None:
    with kept(tmp_path / "primary") as primary, BatchClient(primary.url) as client:
        job_id = client.submit(LINES, deadline_s=0.001)
        with replicated(primary, tmp_path / "replica") as replica_url, BatchClient(replica_url) as reader:
            until_s = (reader.status(job_id).expires_at or 0.0) + 1.0
            wait_until(lambda: time.time() > until_s)
            assert reader.status(job_id).status is JobState.VALIDATING
            assert client.status(job_id).status is JobState.EXPIRED


def test_ack_of_a_replica_waits_for_one(tmp_path: Path) -> None:
    with kept(tmp_path / "primary") as primary, _acked(primary, "replica", 20.0) as client:
        with pytest.raises(SettingsError, match=r"^redis\.ack=replica: Redis has no replica; accepted: a primary"):
            client.submit(LINES)
        with replicated(primary, tmp_path / "replica") as replica_url, BatchClient(replica_url) as reader:
            job_id = client.submit(LINES)
            assert reader.status(job_id).id == job_id


def test_a_replica_that_is_gone_is_an_error_with_the_job(tmp_path: Path) -> None:
    with kept(tmp_path / "primary") as primary, _acked(primary, "replica", 10.0) as client:
        with replicated(primary, tmp_path / "replica"):
            client.submit(LINES)
        with pytest.raises(NotDurable, match="within 5 s that it is on a replica") as caught:
            client.submit(LINES)
        assert client.status(caught.value.job_id).status is JobState.VALIDATING


def _acked(server: RestartableRedis, ack: str, socket_timeout_s: float = 10.0) -> BatchClient:
    return BatchClient(redis_settings(server.url, ack=ack, socket_timeout_s=socket_timeout_s))


# What a script of put's kind writes, and how many bytes of it a power cut takes: of EXEC, and of its last write too.
WRITES = (
    "redis.call('HSETNX', KEYS[1], 'record', 1) redis.call('HINCRBY', KEYS[2], 'done', 1) redis.call('INCR', KEYS[3])"
)


@pytest.mark.parametrize("lost", [1, 20])
@pytest.mark.parametrize("executable", EXECUTABLES.values(), ids=EXECUTABLES)
def test_what_was_torn_does_not_come_back_with_the_start_after_next(
    executable: str, lost: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    # With everysec an answered write waits while a flush lasts, and a kill takes it: in 17 of 20 on a busy disk.
    with kept(tmp_path, executable, appendfsync="always") as server, redis.Redis.from_url(server.url) as client:
        client.set("before", 1)  # of one command alone there is no transaction, nor where it begins
        client.eval(WRITES, 3, "records", "unit", "count")
        FileHistory(server).cut_to(FileHistory(server).num_bytes - lost)
        assert not client.exists("records", "unit", "count")
        file = AppendOnlyFile(client)
        for _ in range(2):
            file.renew()
        wait_until(lambda: not client.info("persistence")["aof_rewrite_in_progress"])
        AppendOnlyFile(client).renew()  # of another worker, which came later
        assert caplog.text.count("writes its append-only file anew") == 1
        client.eval(WRITES, 3, "records", "unit", "count")
        server.kill()
        server.start()
        written = client.hgetall("records"), client.hget("unit", "done"), client.get("count")
        assert written == ({b"record": b"1"}, b"1", b"1")
        AppendOnlyFile(client).renew()
        assert caplog.text.count("writes its append-only file anew") == 2


def test_a_new_file_that_failed_is_asked_for_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with kept(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        client.mset({str(number): number for number in range(10)})
        client.config_set("rdb-key-save-delay", 1_000_000)  # so that the child which writes it is still there
        patient, file = AppendOnlyFile(client), AppendOnlyFile(client, ask_again_s=0.0)
        patient.renew()
        server_id = client.info("server")["process_id"]
        [child] = Path(f"/proc/{server_id}/task/{server_id}/children").read_text().split()
        os.kill(int(child), signal.SIGKILL)
        wait_until(lambda: not client.info("persistence")["aof_rewrite_in_progress"])
        client.config_set("rdb-key-save-delay", 0)
        patient.renew()
        assert not has_renewed(client.info("persistence"))
        assert caplog.text.count("writes its append-only file anew") == 1
        file.renew()
        wait_until(lambda: has_renewed(client.info("persistence")))
        file.renew()
        assert caplog.text.count("writes its append-only file anew") == 2


def test_a_file_that_is_not_there_is_not_written(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with redis.Redis.from_url(redis_url) as client:
        AppendOnlyFile(client).renew()
        assert client.info("persistence")["aof_last_rewrite_time_sec"] == -1
    assert not caplog.text


def test_who_may_not_have_it_written_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with kept(tmp_path) as server, redis.Redis.from_url(server.url) as admin:
        admin.acl_setuser("older", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-bgrewriteaof"])
        with redis.Redis(port=server.port, username="older", password="any") as client:
            file = AppendOnlyFile(client)
            for _ in range(2):
                file.renew()
        assert caplog.text.count("does not write its append-only file anew") == 1
        assert "bgrewriteaof" in caplog.text.lower()
        AppendOnlyFile(admin).renew()
        wait_until(lambda: has_renewed(admin.info("persistence")))
