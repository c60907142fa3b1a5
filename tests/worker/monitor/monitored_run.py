"""A worker at work, with everything that an operator has to look at it."""

from __future__ import annotations

import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.acl_redis import AclRedis, acl_redis
from tests.support.free_port import free_port
from tests.support.millrace import COMMAND
from tests.support.prometheus import instant, prometheus
from tests.support.wait_until import wait_until
from worker.client import BatchClient

START_TIMEOUT_S = 60.0
INTERVAL = "1s"  # of scrapes
# Small shards and few slots, so that a job of some seconds is a queue to look at.
WORKER_SETTINGS = (
    "engine.num_threads=1", "engine.max_num_seqs=8", "engine.kv_cache.num_blocks=80", "worker.shard_size=10",
    "worker.concurrency=2", "worker.send_events=true", "metrics.queue_interval_s=1",
)  # fmt: skip
SYSTEM = "You answer in the style of a miller who has seen every river and trusts none of them. "


@dataclass(frozen=True)
class MonitoredRun:
    """What is left when the jobs are done and everything still runs."""

    server: AclRedis
    started_s: float  # Unix time
    prometheus_url: str
    flower_url: str
    flower_password: str
    worker_id: str


@contextmanager
def monitored_run(directory: Path, model: Path) -> Iterator[MonitoredRun]:
    """Redis with its users, a worker with metrics and events, Prometheus and Flower; two tenants' jobs are run."""
    metrics_port, flower_port = free_port(), free_port()
    settings = [f"--set={setting}" for setting in (*WORKER_SETTINGS, f"metrics.port={metrics_port}")]
    password_file = directory / "page-password"
    with (
        acl_redis(directory, port=free_port()) as server,
        BatchClient(server.producer_url) as client,
        _running(directory / "flower.log", server.flower_url,
                 "flower", f"--port={flower_port}", f"--password-file={password_file}"),
        _running(directory / "worker.log", server.worker_url, "worker", f"--model={model}", *settings),
        prometheus(directory, [f"127.0.0.1:{metrics_port}"], interval=INTERVAL) as prometheus_url,
    ):  # fmt: skip
        flower_url = f"http://127.0.0.1:{flower_port}"
        wait_until(lambda: status_of(flower_url) == 401, timeout_s=START_TIMEOUT_S)
        wait_until(client.workers, timeout_s=START_TIMEOUT_S)
        wait_until(lambda: instant(prometheus_url, "millrace_healthy == 1"), timeout_s=START_TIMEOUT_S)
        started_s = time.time()
        _run_jobs(client)
        # Two more scrapes: the last records are in them.
        ended_s = time.time()
        wait_until(lambda: instant(prometheus_url, f"timestamp(millrace_healthy) > {ended_s + 1}"))
        (worker,) = client.workers()
        password = password_file.read_text().strip()
        yield MonitoredRun(server, started_s, prometheus_url, flower_url, password, worker.id)


def status_of(url: str, authorization: str | None = None, *, method: str = "GET") -> int | None:
    """The status of an answer, None where nobody answers."""
    headers = {} if authorization is None else {"Authorization": authorization}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers, method=method), timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except OSError:
        return None


def _run_jobs(client: BatchClient) -> None:
    def lines(name: str, count: int) -> list[dict[str, object]]:
        return [
            {"prompt": f"{SYSTEM}{name} asks question {number}.", "max_tokens": 32, "temperature": 0}
            for number in range(count)
        ]

    jobs = [
        client.submit(lines("A customer", 80), tenant="shop"),
        client.submit(lines("A reader", 80), tenant="press", priority=2),
        client.submit([{"prompt": "Hello", "no_such_parameter": 1}] * 5, tenant="press"),
    ]
    for job in jobs:
        client.wait(job, timeout_s=100.0)


@contextmanager
def _running(log_file: Path, redis_url: str, *arguments: str) -> Iterator[None]:
    with log_file.open("wb") as log:
        # As in a container: the URL with its password where `ps` does not show it.
        environment = {**os.environ, "MILLRACE_REDIS__URL": redis_url}
        process = subprocess.Popen([*COMMAND, *arguments], stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        yield
    finally:
        process.terminate()
        assert process.wait(timeout=START_TIMEOUT_S) == 0, log_file.read_text()
