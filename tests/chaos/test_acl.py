"""The users of `millrace acl` can do their work, and nothing else, on every redis-server that is found.

Those of other versions are named by TEST_REDIS_SERVERS, see tests/support/processes.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner

from settings import Settings
from tests.chaos.jobs import prompts
from tests.support.http_servers import chat_lines, ended_batch, new_key, records, serving
from tests.support.processes import redis_executables, wait_until
from tests.support.redis_servers import AclRedis, acl_redis, free_port, redis_settings
from tests.support.registry import redis_time_s
from tests.support.tiny_tokenizer import CHAT_TEMPLATE
from tests.support.workers import WorkerProcesses, millrace, python_block, replace_line, worker_processes
from worker.acl import SERVER
from worker.app import create_app
from worker.broker.messages import send_task_to
from worker.cli.main import cli
from worker.client import BatchClient
from worker.registry.connect import connect
from worker.registry.errors import FunctionsMissing
from worker.registry.exchange import ask_one
from worker.registry.keys import Keys, UnitRef
from worker.registry.lua import Scripts
from worker.schemas import JobState

ENDED_S = 30.0
LEASE_S = "3.0"  # so that a busy machine does not look like a dead worker
JOB = "millrace:{s0}:j:s0-00000000-0000-0000-0000-000000000000"
OLDER = "older"
SLOW = {"step_s": 0.05, "slots": 1}  # a prompt takes 50 ms, one after the other

DENIED_TO_BOTH = [
    "FLUSHALL", "FLUSHDB", "SWAPDB 0 1", "SHUTDOWN NOSAVE", "SAVE", "BGSAVE", "REPLICAOF NO ONE",
    "CONFIG GET *", "CONFIG SET dir /tmp", "CONFIG REWRITE", "MODULE LIST", "MODULE LOAD /tmp/x.so", "DEBUG SLEEP 0",
    "ACL LIST", "ACL WHOAMI", "ACL SETUSER me on", "CLIENT LIST", "CLIENT KILL 127.0.0.1:1", "CLIENT PAUSE 1",
    "SCRIPT FLUSH", "SCRIPT KILL", "EVAL return{} 0", "EVAL return{} 1 foreign", f"EVALSHA {'0' * 40} 1 foreign",
    "KEYS *", "RANDOMKEY", "GET foreign", "SET foreign 1", "DEL foreign", "HGETALL foreign", "MOVE foreign 1",
    "LPUSH celery x", "LRANGE celery 0 -1", "RESTORE foreign 0 x", "MIGRATE 127.0.0.1 1 foreign 0 1",
    f"DUMP {JOB}:in", f"RENAME {JOB}:in foreign", f"COPY {JOB}:in foreign", f"SORT {JOB}:ord",
    "PUBLISH channel x", "PUBLISH /0.celery.pidbox x", "SUBSCRIBE channel", "PSUBSCRIBE *",
    "MONITOR", "SLOWLOG GET", "LATENCY RESET", "CLUSTER INFO",
]  # fmt: skip
# From Redis 7.0 on: a producer calls functions and sends no script, which might not end.
DENIED_BESIDE_FUNCTIONS = [
    "SCRIPT LOAD return{}", "SCRIPT EXISTS x", f"EVALSHA {'0' * 40} 0", f"EVALSHA_RO {'0' * 40} 0",
    "EVAL_RO return{} 0", "FUNCTION LOAD x", "FUNCTION LIST", "FUNCTION DUMP", "FUNCTION FLUSH", "FUNCTION KILL",
    "FUNCTION DELETE x", "FCALL x 1 foreign", "FCALL_RO x 1 foreign",
]  # fmt: skip
DENIED_TO_THE_PRODUCER = [
    "BGREWRITEAOF", "BRPOP millrace 1", "RPOP millrace", "LPOP millrace", "LREM millrace 0 x",
    "LTRIM millrace 1 0", "HGETALL unacked", "DEL unacked", "ZRANGE unacked_index 0 -1", "DEL unacked_mutex",
    "HSET unacked x y", "LRANGE millrace:{s0}:deadraw 0 -1", "LPUSH millrace:{s0}:deadraw x",
    "ZRANGEBYSCORE millrace:{s0}:open 0 1",
]  # fmt: skip
DENIED_BUT_TO_THE_SERVER = [
    "HGETALL millrace:{s0}:keys", "HSET millrace:{s0}:keys x y", "HGETALL millrace:{s0}:files:a",
    f"HGETALL millrace:{{s0}}:f:file-s0-{'0' * 36}:in", f"COPY {JOB}:in {JOB}:in:x",
]  # fmt: skip
# It may not see the queue nor what is in it, and tell workers nothing.
DENIED_TO_FLOWER = [
    "LPUSH millrace x", "LLEN millrace", "BRPOP millrace 1", "DEL millrace", "SADD _kombu.binding.millrace x",
    f"HGETALL {JOB}:job", f"HGETALL {JOB}:in", "HGETALL millrace:{s0}:adm", "HGETALL unacked", "SCAN 0", "WAIT 0 0",
    "PUBLISH /0.celeryev/worker.online x",
]  # fmt: skip
DENIED_TO_THE_WORKER = [
    "WAIT 0 0",
    "SCAN 0",
    "BLPOP foreign 1",
    "BRPOP celery 1",
    "RPUSH celery x",
    "SADD _kombu.binding.celery x",
]


EXECUTABLES = redis_executables()


@pytest.fixture(scope="module", params=EXECUTABLES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AclRedis]:
    directory = tmp_path_factory.mktemp("acl")
    with acl_redis(directory, port=free_port(), executable=EXECUTABLES[request.param]) as server:
        yield server


@pytest.fixture
def functions(server: AclRedis) -> None:
    """An administrator has loaded them; skipped on a server that has none."""
    if not server.has_functions:
        pytest.skip("Redis has functions from 7.0 on")
    server.admin.function_load(CliRunner().invoke(cli, ["acl", "--functions"]).stdout, replace=True)


@pytest.fixture
def nothing_denied(server: AclRedis) -> Iterator[None]:
    """Fail at the end, whatever the test did, with the permissions that were missing."""
    server.admin.acl_log_reset()
    yield
    denials = server.denials()
    assert not denials, f"worker/acl.py lacks a permission that is needed: {denials}"


def _url_of_server(server: AclRedis) -> str:
    return server.url(SERVER.name, "a-server's%20p%40ss%2Fword%20%235")


@pytest.fixture
def client(server: AclRedis) -> Iterator[BatchClient]:
    with BatchClient(server.producer_url) as client:
        yield client


@pytest.fixture
def workers(server: AclRedis, tmp_path: Path) -> Iterator[WorkerProcesses]:
    with worker_processes(server.worker_url, tmp_path) as workers:
        yield workers


@pytest.mark.usefixtures("nothing_denied")
def test_jobs_end_in_every_way_and_outlive_a_killed_worker(
    server: AclRedis, client: BatchClient, workers: WorkerProcesses, tmp_path: Path
) -> None:
    engine = SLOW | {"answers_before_gate": 5, "gate": str(tmp_path / "never")}  # killed with most of its job to do
    first = workers.start(engine=engine, worker__lease_s=LEASE_S, metrics__port=str(free_port()))
    workers.wait_up(client)
    job_id = client.submit(prompts(40), idempotency_key="a key of our own")
    wait_until(lambda: client.status(job_id).request_counts.completed >= 3, timeout_s=ENDED_S)
    first.kill()
    cancelled, expired = client.submit(prompts(30), priority=8), client.submit(prompts(30), deadline_s=0.2)
    refused = client.submit([*prompts(3), b"{"], strict=True)
    client.cancel(cancelled)
    deadline_s = redis_time_s(server.admin) + 0.2  # not before the job's
    wait_until(lambda: redis_time_s(server.admin) > deadline_s)  # else a fast worker would be done before
    workers.start(worker__lease_s=LEASE_S, worker__send_events="true")

    assert client.wait(job_id, ENDED_S).request_counts.completed == 40
    assert client.wait(cancelled, ENDED_S).status is JobState.CANCELLED
    assert client.wait(expired, ENDED_S).status is JobState.EXPIRED
    assert client.wait(refused, ENDED_S).status is JobState.FAILED
    assert client.submit(prompts(40), idempotency_key="a key of our own") == job_id
    assert len(list(client.results(job_id, follow=True))) == 40
    assert len(list(client.results(job_id, order="input"))) == 40
    assert {job.id for job in client.jobs()} >= {job_id, cancelled, expired}


@pytest.mark.usefixtures("nothing_denied")
def test_an_http_server_answers_every_route_as_a_user_of_its_own(server: AclRedis, workers: WorkerProcesses) -> None:
    key = new_key(_url_of_server(server), "a")
    if server.has_functions:
        server.admin.function_flush()  # there may be a server before any worker
    with serving(_url_of_server(server)) as http, http.openai(key) as openai:
        file = openai.files.create(file=("a.jsonl", chat_lines("a", "b")), purpose="batch")
        cancelled = openai.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        assert openai.batches.cancel(cancelled.id).status == "cancelled"
        workers.start(engine={"chat_template": CHAT_TEMPLATE}, model__aliases="fake")
        batch = openai.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        done = ended_batch(openai, batch.id)
        assert done.output_file_id is not None
        assert len(records(openai.files.content(done.output_file_id).read())) == 2
        assert "fake" in {model.id for model in openai.models.list()}
        assert {listed.id for listed in openai.batches.list()} == {batch.id, cancelled.id}
        assert [listed.id for listed in openai.files.list()] == [file.id]
        assert openai.files.content(file.id).read() == chat_lines("a", "b")
        assert openai.files.delete(file.id).deleted
        assert openai.files.delete(done.output_file_id).deleted
        assert http.http.get("/healthz").status_code == 200
        cookie = {"Cookie": f"millrace_key={key}"}
        assert '<td data-name="KV in use">' in http.http.get("/", headers=cookie).text
        with http.http.stream("GET", "/events", headers=cookie) as events:
            assert any('id="workers"' in line for line in events.iter_lines())


@pytest.mark.usefixtures("nothing_denied")
@pytest.mark.parametrize("url_of", [lambda server: server.worker_url, _url_of_server], ids=["worker", "server"])
def test_who_sends_callbacks_may_send_tasks(server: AclRedis, url_of: Callable[[AclRedis], str]) -> None:
    server.admin.delete("done")
    app = create_app(Settings(redis=redis_settings(url_of(server))))
    send_task_to(app, "done", "shop.on_batch", "evt_1", {})
    app.close()
    assert server.admin.llen("done") == 1


@pytest.mark.usefixtures("nothing_denied")
def test_every_command_of_the_command_line_works(
    server: AclRedis, client: BatchClient, workers: WorkerProcesses, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MILLRACE_REDIS__URL", server.producer_url)
    lines = tmp_path / "lines.jsonl"
    lines.write_text("\n".join(json.dumps(line) for line in prompts(5)))
    workers.start()
    workers.wait_up(client)
    job_id = millrace("submit", lines, "--wait").stdout.decode().strip()

    # In this process: starting seven others would take most of this test.
    for command in (("status", job_id), ("watch", job_id), ("results", job_id), ("errors", job_id), ("jobs",)):
        done = CliRunner().invoke(cli, command)
        assert done.exit_code == 0, done.output
    assert CliRunner().invoke(cli, ["cancel", job_id]).exit_code == 0
    findings = json.loads(CliRunner().invoke(cli, ["doctor", "--json"]).stdout)
    permissions = next(finding for finding in findings if finding["check"] == "redis permissions")
    assert permissions["level"] == "ok", permissions


@pytest.mark.usefixtures("nothing_denied")
def test_the_readmes_python_producers_work_with_a_password(
    server: AclRedis, client: BatchClient, workers: WorkerProcesses
) -> None:
    plain_celery = python_block(after="From a plain Celery producer")
    plain_celery = replace_line(plain_celery, "url = ", f"url = {server.producer_url!r}")
    environment = {**os.environ, "MILLRACE_REDIS__URL": server.producer_url}
    workers.start()
    workers.wait_up(client)

    for code in (plain_celery, python_block(after="From Python")):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, check=False, timeout=60, env=environment
        )

        assert done.returncode == 0, done.stderr.decode()
        assert b"'status_code': 200" in done.stdout


def test_a_user_that_lacks_a_permission_is_found_by_doctor(server: AclRedis, tmp_path: Path) -> None:
    options = ["doctor", "--json", "--model", str(tmp_path)]  # with a model: this machine is to be a worker
    findings = json.loads(CliRunner().invoke(cli, [*options, "--redis-url", server.producer_url]).stdout)
    lacking = next(finding for finding in findings if finding["check"] == "redis permissions")
    assert (lacking["level"], lacking["detail"]) == ("failed", "a worker needs EXISTS unacked")
    assert "millrace acl" in lacking["fix"]


@pytest.mark.parametrize("call", [*DENIED_TO_BOTH, *DENIED_TO_THE_PRODUCER])
def test_the_producer_may_not(server: AclRedis, call: str) -> None:
    _assert_denied(server.producer_url, call)


@pytest.mark.parametrize("call", [*DENIED_TO_BOTH, *DENIED_TO_THE_WORKER])
def test_the_worker_may_not(server: AclRedis, call: str) -> None:
    _assert_denied(server.worker_url, call)


@pytest.mark.parametrize("call", [*DENIED_TO_BOTH, *DENIED_TO_THE_PRODUCER])
def test_the_http_server_may_not(server: AclRedis, call: str) -> None:
    _assert_denied(_url_of_server(server), call)


@pytest.mark.parametrize("call", DENIED_BUT_TO_THE_SERVER)
def test_only_the_http_server_sees_files_and_keys(server: AclRedis, call: str) -> None:
    for url in (server.producer_url, server.flower_url):
        _assert_denied(url, call)


@pytest.mark.parametrize("call", [*DENIED_TO_BOTH, *DENIED_TO_FLOWER])
def test_flower_may_not(server: AclRedis, call: str) -> None:
    _assert_denied(server.flower_url, call)


def test_a_script_may_touch_no_other_key_than_its_caller(server: AclRedis) -> None:
    """That holds for keys that it does not declare, too."""
    for url in (server.worker_url,) if server.has_functions else (server.producer_url, server.worker_url):
        with redis.Redis.from_url(url) as user:
            digest = user.script_load("return redis.call('GET', 'for' .. 'eign')")
            with pytest.raises(redis.RedisError, match=r"(?i)access|permission"):
                user.evalsha(digest, 0)


@pytest.mark.usefixtures("functions")
def test_a_function_may_touch_no_other_key_than_its_caller(server: AclRedis) -> None:
    body = "redis.register_function('peep', function() return redis.call('GET', 'for' .. 'eign') end)"
    server.admin.function_load(f"#!lua name=peep\n{body}", replace=True)
    for url in (server.producer_url, server.worker_url):
        with redis.Redis.from_url(url) as user, pytest.raises(redis.RedisError, match=r"(?i)access|permission"):
            user.fcall("peep", 0)


@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize("call", DENIED_BESIDE_FUNCTIONS)
def test_a_producer_sends_no_script_where_there_are_functions(server: AclRedis, call: str) -> None:
    _assert_denied(server.producer_url, call)


def test_a_producer_is_told_which_command_loads_the_functions(server: AclRedis, client: BatchClient) -> None:
    if not server.has_functions:
        pytest.skip("Redis has functions from 7.0 on")
    server.admin.function_flush()

    with pytest.raises(FunctionsMissing, match=r"millrace acl --functions \| redis-cli -x FUNCTION LOAD REPLACE"):
        client.submit(prompts(1))
    server.admin.function_load(CliRunner().invoke(cli, ["acl", "--functions"]).stdout)

    assert client.status(client.submit(prompts(1))).request_counts.total == 1


@pytest.mark.usefixtures("functions")
def test_a_user_who_may_send_scripts_still_calls_the_functions(server: AclRedis) -> None:
    """As an older user does once its ACL file is made anew, in the middle of its work."""
    server.admin.acl_setuser(
        OLDER, enabled=True, passwords=["+older"], keys=["*"], commands=["+@all", "-fcall", "-fcall_ro"]
    )
    with BatchClient(server.url(OLDER, "older")) as client:
        client.submit(prompts(1))  # by scripts
        server.admin.acl_setuser(OLDER, commands=["+fcall", "+fcall_ro", "-evalsha", "-script"])

        assert client.status(client.submit(prompts(1))).request_counts.total == 1


@pytest.mark.usefixtures("functions")
def test_no_function_runs_for_ever_whatever_a_producer_writes(server: AclRedis) -> None:
    keys = Keys()
    job_id = keys.new_job_id()
    of_job = keys.of_unit_scripts(UnitRef.plan(job_id)) | {"tenant_counters": keys.tenant_counters("x")}
    endless = 10**15
    job = {"v": 1, "st": "running", "n": endless, "ns": endless, "sd": 0, "cancel": 0, "ok": 1, "err": 0}
    submission = {"job_id": "x", "n": endless, "max_prompts": endless, "staging_ms": 1000, "bytes": -1}
    calls = [
        Scripts.SUBMIT({**of_job, "job": keys.job(keys.new_job_id())}, job=json.dumps(submission)),
        Scripts.CANCEL(of_job, job_id=job_id),
        Scripts.PAGE(of_job, order="input", cursor=0, last="", max_records=endless, max_bytes=endless),
    ]
    with connect(redis_settings(server.producer_url, socket_timeout_s=5.0)) as producer:
        producer.hset(keys.job(job_id), mapping={**job, "fin": 0, "retain": 0, "deadline": 0})
        producer.hset(keys.records(job_id), "1", "{}")
        for call in calls:
            ask_one(producer, call)  # else it would time out, and the server would be busy for ever after


@pytest.mark.parametrize(
    "url", ["redis://127.0.0.1:{port}/0", "redis://:x@127.0.0.1:{port}/0", "redis://me:x@127.0.0.1:{port}/0"]
)
def test_nobody_else_gets_in(server: AclRedis, url: str) -> None:
    with redis.Redis.from_url(url.format(port=server.port)) as nobody, pytest.raises(redis.AuthenticationError):
        nobody.ping()


def _assert_denied(url: str, call: str) -> None:
    with redis.Redis.from_url(url) as user, pytest.raises(redis.exceptions.NoPermissionError):
        user.execute_command(*call.split(" "))
