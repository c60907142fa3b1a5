"""The HTTP server: batches as they are asked for, refusals as OpenAI words them, and clients that mean no good."""

from __future__ import annotations

import json
import math
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from click.testing import CliRunner

from settings import LimitSettings, MetricsSettings
from tests.support.http_servers import HttpServer, bearer, chat_lines, ended_batch, new_key, serving
from tests.support.processes import ROOT, wait_until, warm_interpreter
from tests.support.redis_servers import free_port
from tests.support.registry import TestRegistry, must_claim, ok
from tests.support.tiny_tokenizer import CHAT_TEMPLATE
from tests.support.workers import CLI, WorkerProcesses, millrace
from worker.cli.main import cli
from worker.client import BatchClient
from worker.metrics.catalogue import PROCESS_METRICS, QUEUE_METRICS, SERVER_METRICS
from worker.registry.backlog import backlog
from worker.registry.exchange import perform, text
from worker.registry.keys import UnitRef
from worker.schemas import JobStatus

GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
OPERATIONS_PAGE = ROOT / "worker" / "OPERATIONS.md"


@pytest.fixture
def server(redis_url: str) -> Iterator[HttpServer]:
    with serving(redis_url) as server:
        yield server


def _error(answer: httpx2.Response) -> tuple[int, str | None]:
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return answer.status_code, error["param"]


REFUSED_BATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown file": ({"input_file_id": "file-s0-" + "0" * 36}, "input_file_id"),
    "a name that is no file's": ({"input_file_id": "../x"}, "input_file_id"),
    "a number for a file": ({"input_file_id": 7}, "input_file_id"),
    "another endpoint": ({"endpoint": "/v1/images"}, "endpoint"),
    "no window": ({"completion_window": "soon"}, "completion_window"),
    "a window beyond a year": ({"completion_window": "9999d"}, "deadline_s"),
    "an unknown parameter": ({"modle": "x"}, "modle"),
    "metadata that is no text": ({"metadata": {"a": 1}}, "metadata.a"),
    "too much metadata": ({"metadata": {f"k{number}": "" for number in range(17)}}, "metadata"),
    "an expiry in a second": (
        {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
        "output_expires_after.seconds",
    ),
    "an option of ours that is none": ({"metadata": {"millrace.speed": "1"}}, "metadata.millrace.speed"),
    "a priority that is none": ({"metadata": {"millrace.priority": "10"}}, "metadata.millrace.priority"),
}


@pytest.mark.parametrize("kind", REFUSED_BATCHES)
def test_a_batch_that_is_refused_names_what_is_wrong(server: HttpServer, kind: str) -> None:
    fields, param = REFUSED_BATCHES[kind]
    file_id = server.upload_id(chat_lines("a"))
    answer = server.create(file_id, **fields)
    assert _error(answer) == (400, param)
    assert "<" not in answer.json()["error"]["message"]  # nothing of Python's own
    assert server.http.get("/v1/batches").json()["data"] == []


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"nul", b"\xff", b'{"a":' * 2000])
def test_a_body_that_is_no_object_is_refused(server: HttpServer, body: bytes) -> None:
    assert _error(server.http.post("/v1/batches", content=body)) == (400, None)


def test_a_body_too_large_and_a_method_or_path_that_is_not_there(server: HttpServer) -> None:
    assert _error(server.http.post("/v1/batches", content=b" " * 70_000))[0] == 413
    for path in ("/v1/poems", "/v1/files/", "/healthz/"):  # and no redirect, to whatever host is named
        unknown = server.http.get(path, headers={"Host": "example.com"})
        assert (_error(unknown)[0], unknown.json()["error"]["code"]) == (404, "unknown_url")
    wrong = server.http.put("/v1/batches/x/cancel")
    assert (_error(wrong)[0], wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["Allow"] in wrong.json()["error"]["message"]
    assert _error(server.http.get("/v1/files?limit=0")) == (400, "limit")
    assert _error(server.http.get("/v1/batches?limit=101")) == (400, "limit")
    assert _error(server.http.get("/v1/batches?page=1")) == (400, "page")
    assert _error(server.http.get("/v1/files?order=up")) == (400, "order")
    assert _error(server.http.get("/v1/files?purpose=batch_output")) == (400, "purpose")
    assert _error(server.http.get("/v1/models/none")) == (404, "model")


def test_options_of_ours_and_the_results_life_reach_the_job(server: HttpServer, registry: TestRegistry) -> None:
    metadata = {"millrace.priority": "0", "millrace.model": "fake", "millrace.strict": "false", "mine": "x"}
    expiry = {"anchor": "created_at", "seconds": 7200}
    answer = server.create(server.upload_id(chat_lines("a")), metadata=metadata, output_expires_after=expiry)
    found = answer.json()
    assert (found["priority"], found["model"], found["metadata"]) == (0, "fake", metadata)
    job = registry.redis.hgetall(registry.keys.job(found["id"]))
    assert (job[b"strict"], job[b"retain"]) == (b"0", b"7200000")


def test_a_batch_under_a_known_key_is_the_first_one(server: HttpServer) -> None:
    def create(file_id: str) -> httpx2.Response:
        body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        return server.http.post("/v1/batches", json=body, headers={"Idempotency-Key": "nightly"})

    file_id = server.upload_id(chat_lines("a"))
    first = create(file_id).json()
    assert create(file_id).json() == first
    assert create(server.upload_id(chat_lines("b"))).status_code == 409
    for gone in (file_id, server.upload_id(chat_lines("c"))):  # the first one's file, and another
        server.http.delete(f"/v1/files/{gone}")
        answer = create(gone)
        assert answer.json() == first if gone == file_id else answer.status_code == 400
    assert len(server.http.get("/v1/batches").json()["data"]) == 1


def test_a_full_queue_says_when_to_come_back(redis_url: str) -> None:
    limits = LimitSettings(max_prompts_per_job=2, max_open_prompts=2)
    with serving(redis_url, limits=limits) as server:
        file_id = server.upload_id(chat_lines("a", "b"))
        server.create_id(file_id)
        answer = server.create(file_id)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert int(answer.headers["Retry-After"]) >= 1


def test_an_ended_batch_is_not_cancelled(server: HttpServer, registry: TestRegistry) -> None:
    job_id = server.create_id(server.upload_id(chat_lines("a")))
    registry.redis.hset(registry.keys.job(job_id), "st", "done")
    assert server.http.post(f"/v1/batches/{job_id}/cancel").status_code == 409


def test_a_cancel_that_takes_long_holds_up_no_other(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (server.create_id(server.upload_id(chat_lines(name))) for name in "ab")
    began, may_go_on, cancel = threading.Event(), threading.Event(), BatchClient.cancel

    def slow(client: BatchClient, job_id: str) -> JobStatus:
        if job_id == first:
            began.set()
            may_go_on.wait(60)
        return cancel(client, job_id)

    monkeypatch.setattr(BatchClient, "cancel", slow)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.http.post, f"/v1/batches/{first}/cancel")
        assert began.wait(30)
        try:
            assert server.http.post(f"/v1/batches/{second}/cancel", timeout=30).json()["status"] == "cancelled"
            assert not waiting.done()
        finally:
            may_go_on.set()
        assert waiting.result().json()["status"] == "cancelled"


def test_the_job_is_announced_and_keeps_the_files_lines(server: HttpServer, registry: TestRegistry) -> None:
    job_id = server.create_id(server.upload_id(chat_lines("a", "b")))
    lines = [registry.redis.hget(registry.keys.lines(job_id), str(index)) for index in range(2)]
    assert b"".join(line + b"\n" for line in lines if isinstance(line, bytes)) == chat_lines("a", "b")
    assert registry.redis.ttl(registry.keys.lines(job_id)) == -1
    assert registry.redis.exists(registry.keys.unit(UnitRef.plan(job_id)))
    frames = [
        text(key)
        for key in registry.redis.keys("millrace*")
        if text(key).startswith("millrace\x06") or key == b"millrace"
    ]
    assert frames


def test_health_says_whether_redis_answers(
    server: HttpServer, registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.http.get("/healthz").json() == {"status": "ok", "reasons": []}
    monkeypatch.setattr("worker.serve.app.REDIS_TIMEOUT_S", 0.5)
    registry.redis.execute_command("CLIENT", "PAUSE", "5000")  # type: ignore[no-untyped-call]  # redis has no type here
    try:
        assert server.http.get("/healthz").status_code == 503
    finally:
        registry.redis.execute_command("CLIENT", "UNPAUSE")  # type: ignore[no-untyped-call]  # nor here


def _raw(server: HttpServer, data: bytes) -> bytes:
    """What the server answers to these bytes until it closes the connection."""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=30) as connection:
        connection.sendall(data)
        found = b""
        while part := connection.recv(65536):
            found += part
        return found


@pytest.mark.parametrize(
    "data",
    [
        GET + b"X: " + b"x" * 40_000 + b"\r\n\r\n",
        b"".join([GET, *(b"X%d: %b\r\n" % (number, b"x" * 90) for number in range(400)), b"\r\n"]),
        GET + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        GET + b"Content-Length: 5, 6\r\n\r\nhello",
        GET + b"Content-Length: -1\r\n\r\n",
        GET + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /v1/files HTTP/1.1\r\n\r\n",
        GET + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        GET + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        GET + b"Host: other\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n\r\n",
        b"GET  /healthz\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
    ],
    ids=range(12),
)
def test_oversized_headers_and_ambiguous_requests_are_refused(redis_url: str, data: bytes) -> None:
    with serving(redis_url, read_timeout_s=2) as server:
        answer = _raw(server, data)
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 ", b"HTTP/1.1 501 ")), answer[:200]
    assert answer.count(b"HTTP/1.1 ") == 1


def test_headers_that_do_not_come_in_time_end_the_connection(redis_url: str) -> None:
    with serving(redis_url, read_timeout_s=0.5) as server:
        assert _raw(server, b"") == b""
        assert _raw(server, GET) == b""
        assert server.http.get("/healthz").status_code == 200


def test_a_json_body_that_stops_is_given_up(redis_url: str) -> None:
    head = b"POST /v1/batches HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
    with serving(redis_url, read_timeout_s=0.5) as server:
        answer = _raw(server, head)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"\r\nconnection: close\r\n" in answer


def test_connections_beyond_the_limit_are_turned_away(redis_url: str) -> None:
    with serving(redis_url, max_connections=20) as server, ExitStack() as stack:
        port = int(server.url.rpartition(":")[2])
        for _ in range(20):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        wait_until(lambda: server.http.get("/healthz", headers={"Connection": "close"}).status_code == 503)
        stack.close()
        wait_until(lambda: server.http.get("/healthz", headers={"Connection": "close"}).status_code == 200)


def _figure(server: HttpServer, name: str, labels: str = "") -> float:
    text_of_all = server.http.get("/metrics").text
    [line] = [line for line in text_of_all.splitlines() if line.startswith(f"{name}{labels} ")]
    return float(line.rpartition(" ")[2])


def _wanted_workers(server: HttpServer, model: str) -> int:
    """What KEDA makes of the triggers of OPERATIONS.md: the most that one wants, value over targetValue rounded up.

    It starts from none where a value is above activationTargetValue, 0 unless it is given.
    """
    text_of_all, scaled = server.http.get("/metrics").text, _documented_scaling()
    wanted = []
    for trigger in scaled["triggers"]:
        location = trigger["metadata"]["valueLocation"].replace("Qwen3-8B", model)
        assert trigger["metadata"]["format"] == "prometheus"
        [value] = [float(line.rpartition(" ")[2]) for line in text_of_all.splitlines() if line.startswith(location)]
        wanted.append(math.ceil(value / float(trigger["metadata"]["targetValue"])) if value > 0 else 0)
    return int(min(max(wanted), scaled["maxReplicaCount"]) if any(wanted) else scaled["minReplicaCount"])


def _documented_scaling() -> dict[str, Any]:
    example = OPERATIONS_PAGE.read_text().partition("```yaml\napiVersion: keda")[2].partition("```")[0]
    [found] = [
        part["spec"] for part in yaml.safe_load_all(f"apiVersion: keda{example}") if part["kind"] == "ScaledObject"
    ]
    return dict(found)


def test_the_gauge_to_start_workers_by_rises_without_any_and_falls_again(
    redis_url: str, workers: WorkerProcesses
) -> None:
    with serving(redis_url, metrics=MetricsSettings(queue_interval_s=1)) as server, server.openai() as openai:
        assert _figure(server, "millrace_queue_model_open_prompts", '{model=""}') == 0
        batch_id = server.create_id(server.upload_id(chat_lines("a", "b")))
        named = server.create(server.upload_id(chat_lines("c")), metadata={"millrace.model": "other"}).json()["id"]
        open_prompts = "millrace_queue_model_open_prompts"
        wait_until(lambda: f'{open_prompts}{{model=""}} 2.0' in server.http.get("/metrics").text)
        wait_until(lambda: f'{open_prompts}{{model="other"}} 1.0' in server.http.get("/metrics").text)
        assert _figure(server, "millrace_queue_model_waiting_prompts", '{model=""}') == 2
        tokens = round(len(chat_lines("a", "b")) / 4)
        assert abs(_figure(server, "millrace_queue_model_waiting_tokens", '{model=""}') - tokens) <= 1
        assert _wanted_workers(server, "other") == 1
        assert _figure(server, "millrace_queue_model_oldest_wait_seconds", '{model="other"}') > 0
        assert _figure(server, "millrace_queue_open_jobs") == 2
        found = json.loads(_run("queue", "--json", "--redis-url", redis_url)[1])
        assert (found["open_jobs"], found["open_prompts"], found["unread_units"]) == (2, 3, 0)
        models = {model["model"]: (model["open_prompts"], model["waiting_prompts"]) for model in found["models"]}
        assert models == {"": (2, 2), "other": (1, 1)}
        assert "(none named)" in _run("queue", "--redis-url", redis_url)[1]

        server.http.post(f"/v1/batches/{named}/cancel")
        workers.start(engine={"chat_template": CHAT_TEMPLATE}, model__name="fake")
        ended_batch(openai, batch_id)
        wait_until(lambda: f'{open_prompts}{{model="fake"}} 0.0' in server.http.get("/metrics").text)
        assert 'model="other"' not in server.http.get("/metrics").text
        assert _wanted_workers(server, "fake") == 0
        assert _figure(server, "millrace_queue_records_total") == 3
        route = '{method="POST",route="/v1/files",status="200"}'
        assert _figure(server, "millrace_http_requests_total", route) == 2


def test_prompts_of_a_shard_that_a_worker_has_do_not_wait(registry: TestRegistry) -> None:
    job_id = registry.running_job([0, 1, 2], [3])
    leases = registry.leases()
    shard = must_claim(leases, UnitRef.shard(job_id, 0))
    [_, before] = perform(registry.redis, backlog(registry.keys)).models
    leases.put(shard, [ok(1)])
    [_, model] = perform(registry.redis, backlog(registry.keys)).models
    assert (model.model, model.open_prompts, model.waiting_prompts) == ("fake", 3, 1)
    assert model.oldest_wait_s >= 0
    assert (before.open_tokens, before.waiting_tokens) == (
        round(4 * 15 / 4),
        round(15 / 4),
    )  # bytes of `{"prompt": "a"}`
    assert (model.open_tokens, model.waiting_tokens) == (3 * 8, 8)  # as the answered one had


def test_metrics_tell_of_all_tenants_and_so_need_a_key_of_their_own(redis_url: str) -> None:
    tenants, metrics = new_key(redis_url, "a"), new_key(redis_url, None)
    with serving(redis_url) as server:
        answers = [server.http.get("/metrics", headers=bearer(key)).status_code for key in ("", tenants, metrics)]
        assert answers == [401, 403, 200]


def test_every_metric_of_the_catalogue_is_served(server: HttpServer) -> None:
    names = set(re.findall(r"^# TYPE (\w+)", server.http.get("/metrics").text, re.MULTILINE))
    wanted = {metric.name for metric in (*QUEUE_METRICS, *SERVER_METRICS, *PROCESS_METRICS)}
    assert names == wanted


def _run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, arguments)
    return result.exit_code, result.output


def test_keys_are_created_listed_and_revoked_by_the_command(server: HttpServer, redis_url: str) -> None:
    code, output = _run("keys", "create", "--tenant", "team-a", "--name", "laptop", "--json", "--redis-url", redis_url)
    made: dict[str, Any] = json.loads(output)
    assert (code, made["tenant"], made["name"]) == (0, "team-a", "laptop")
    assert server.http.get("/v1/files", headers=bearer(made["key"])).status_code == 200
    code, output = _run("keys", "list", "--json", "--redis-url", redis_url)
    assert json.loads(output) == [{name: value for name, value in made.items() if name != "key"}]
    assert made["id"] in _run("keys", "list", "--redis-url", redis_url)[1]
    assert _run("keys", "revoke", made["id"], "--redis-url", redis_url)[0] == 0
    assert _run("keys", "revoke", made["id"], "--redis-url", redis_url)[0] == 1
    assert _run("keys", "list", "--redis-url", redis_url) == (0, "")


def test_all_keys_of_a_tenant_are_listed_and_revoked_together(server: HttpServer, redis_url: str) -> None:
    keys = [new_key(redis_url, tenant) for tenant in ("a", "a", "b", None)]
    listed = json.loads(_run("keys", "list", "--tenant", "a", "--json", "--redis-url", redis_url)[1])
    assert [entry["tenant"] for entry in listed] == ["a", "a"]
    assert _run("keys", "revoke", "--tenant", "a", "--redis-url", redis_url)[0] == 0
    assert [server.http.get("/v1/files", headers=bearer(key)).status_code for key in keys] == [401, 401, 200, 403]
    assert _run("keys", "revoke", "--tenant", "a", "--redis-url", redis_url)[0] == 1
    for arguments in ((), (listed[0]["id"], "--tenant", "b")):
        assert _run("keys", "revoke", *arguments, "--redis-url", redis_url)[0] == 2


@pytest.mark.parametrize("options", [(), ("--tenant", "a", "--metrics"), ("--tenant", "two words"), ("--tenant", "")])
def test_a_key_is_of_one_tenant_or_for_metrics(redis_url: str, options: tuple[str, ...]) -> None:
    assert _run("keys", "create", *options, "--redis-url", redis_url)[0] == 2


def test_the_command_refuses_an_open_address_without_a_key(redis_url: str) -> None:
    result = millrace("serve", "--host", "0.0.0.0", "--port", str(free_port()), "--redis-url", redis_url)
    assert result.returncode == 2
    assert b"millrace keys create" in result.stderr


def test_the_command_serves_until_it_is_told_to_stop(redis_url: str, tmp_path: Path) -> None:
    port = free_port()
    with (tmp_path / "log").open("wb") as log:
        process = warm_interpreter().start(CLI, ["serve", "--port", str(port), "--redis-url", redis_url], log)
        try:
            with httpx2.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
                wait_until(lambda: process.poll() is None and _answers(http))
            second = millrace("serve", "--port", str(port), "--redis-url", redis_url)
            assert (second.returncode, b"could not serve" in second.stderr) == (1, True)
            process.terminate()
            assert process.wait(30) == 0
        finally:
            process.kill()


def _answers(http: httpx2.Client) -> bool:
    try:
        return http.get("/healthz").status_code == 200
    except httpx2.TransportError:
        return False
