"""Walks through compose.yaml with real containers and tells what happens: `python -m tests.compose [TRANSCRIPT]`.

Up, a job, killed workers, a Redis that restarts, a stop, down; each walk in a project of its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import redis

from tests.compose.compose_project import (
    ComposeProject,
    Producer,
    Transcript,
    WorkerContainer,
    compose_project,
    docker,
    find_torch_wheel,
    inspect,
    served_index,
)
from tests.support.redis_servers import free_port
from worker.client import BatchClient
from worker.demo.tickets import GradedAnswers, demo_lines, numbered_tickets
from worker.schemas import JobStatus

IMAGE = "millrace:test"
NUM_TICKETS = 600
TICKETS_SEED = 11
NUM_WORKERS = 2
START_TIMEOUT_S = 180.0
JOB_TIMEOUT_S = 240.0
# Three probes in a row that fail: 10 s apart, 10 s each.
UNHEALTHY_TIMEOUT_S = 120.0
STOP_GRACE_S = 60.0  # compose.yaml's stop_grace_period
_LIMITS = "id -u; grep -E '^(CapEff|NoNewPrivs)' /proc/self/status; touch /venv/x 2>&1; touch /tmp/x && echo writable"
_AS_LIMITED = (
    "10001\nCapEff:\t0000000000000000\nNoNewPrivs:\t1\ntouch: cannot touch '/venv/x': Read-only file system\nwritable\n"
)

FILES = ("compose.yaml", "tests/compose/compose.test.yaml")
WHEELS = "tests/compose/compose.wheels.yaml"


class Walkthrough:
    """The whole story, step by step. What is not as it should be is an AssertionError."""

    def __init__(self, project: ComposeProject, directory: Path, port: int, transcript: Transcript) -> None:
        self._project = project
        self._directory = directory
        self._port = port
        self._transcript = transcript
        self._say = transcript.say
        self._tickets = numbered_tickets(TICKETS_SEED, NUM_TICKETS)

    def run(self) -> None:
        """Build, start, work through the faults, stop, take down."""
        self._build()
        self._up()
        self._check_containers()
        producer = self._producer()
        job_id = producer.submit()
        self._say(f"$ millrace submit requests.jsonl: {job_id}, {NUM_TICKETS} requests, nothing disturbs it")
        undisturbed = producer.results(job_id)
        assert len(undisturbed) == NUM_TICKETS
        right = GradedAnswers.of_records(self._tickets, undisturbed.values()).accuracy
        self._say(f"done, {right:.1%} of the tickets right; this is what the other runs are compared with")
        with producer.client() as client:
            self._same(undisturbed, producer, self._killed_workers(producer, client))
            self._frozen_worker()
            self._same(undisturbed, producer, self._stopped_workers(producer, client))
        self._check_secrets()
        self._down()

    def _build(self) -> None:
        self._project.build()
        size_bytes = inspect(IMAGE)["Size"]
        self._say(f"$ docker compose build: {size_bytes / 1e6:.0f} MB")
        sizes = "du -sm /venv/lib/python3.11/site-packages/* /usr/lib /usr/local | sort -rn | head -n 8"
        self._transcript.show(docker("run", "--rm", "--entrypoint", "sh", IMAGE, "-c", sizes))

    def _up(self) -> None:
        self._project.run("up", "-d", "--scale", f"worker={NUM_WORKERS}", timeout_s=START_TIMEOUT_S)
        self._say(f"$ docker compose up -d --scale worker={NUM_WORKERS}: Redis is healthy, the workers are starting")
        for worker in self._workers():
            self._wait_healthy(worker)
        self._show_ps()

    def _check_containers(self) -> None:
        (acl,) = self._project.containers("acl")
        assert inspect(acl)["State"]["ExitCode"] == 0
        (server,) = self._project.containers("redis")
        assert docker("exec", server, "id", "-un").strip() == "redis"
        for worker in self._workers():
            assert worker.execute("sh", "-c", _LIMITS) == _AS_LIMITED
        self._say("workers: user 10001, no capabilities, no new privileges, a read-only root; Redis: user redis")

    def _producer(self) -> Producer:
        password = self._project.secret("producer")
        self._say("$ docker compose run ... cat acl /secrets/producer/password > producer.password")
        url = f"redis://millrace-producer@127.0.0.1:{self._port}/0"
        return Producer(self._directory, url, password, demo_lines(self._tickets))

    def _killed_workers(self, producer: Producer, client: BatchClient) -> str:
        first, second = self._workers()
        job_id = producer.submit()
        self._say(f"$ millrace submit requests.jsonl: {job_id}")
        self._wait_finished(client, job_id, 0.05)
        first.signal("KILL")
        self._say(f"kill -9 of the process in {first.name}: {_progress(client.status(job_id))}")
        self._transcript.wait(f"{first.name} was started again", lambda: first.num_restarts == 1, START_TIMEOUT_S)
        self._project.run("restart", "redis")
        self._say(f"$ docker compose restart redis: {_progress(client.status(job_id))}")
        self._wait_finished(client, job_id, 0.3)
        docker("kill", second.id)
        self._say(f"$ docker kill {second.name}: {_progress(client.status(job_id))}")
        self._wait_healthy(first)
        self._show_ps()
        return job_id

    def _frozen_worker(self) -> None:
        """A worker that is there and does nothing."""
        self._project.run("up", "-d", "--scale", f"worker={NUM_WORKERS}")
        _, second = self._workers()
        self._wait_healthy(second)
        second.signal("STOP")
        self._say(f"SIGSTOP to the process in {second.name}")
        self._transcript.wait(f"{second.name} is unhealthy", lambda: second.health == "unhealthy", UNHEALTHY_TIMEOUT_S)
        self._transcript.show(second.state["Health"]["Log"][-1]["Output"])
        second.signal("CONT")
        self._wait_healthy(second)

    def _stopped_workers(self, producer: Producer, client: BatchClient) -> str:
        """SIGTERM in the middle of a job, and a start later."""
        workers = self._workers()
        job_id = producer.submit()
        self._say(f"$ millrace submit requests.jsonl: {job_id}")
        self._wait_finished(client, job_id, 0.05)
        asked_s = datetime.now().timestamp()
        self._project.run("stop", "worker")
        for worker in workers:
            stopped_s = _seconds(worker.state["FinishedAt"]) - asked_s
            assert worker.state["ExitCode"] == 0, worker.state
            assert stopped_s < STOP_GRACE_S, stopped_s
            self._say(f"$ docker compose stop worker: {worker.name} exited 0 after {stopped_s:.1f} s")
        self._say(f"the job: {_progress(client.status(job_id))}")
        self._project.run("up", "-d", "--scale", f"worker={NUM_WORKERS}")
        self._say("$ docker compose up -d")
        return job_id

    def _same(self, undisturbed: Mapping[str, Any], producer: Producer, job_id: str) -> None:
        records = producer.results(job_id)
        assert sorted(records) == sorted(undisturbed)
        different = [name for name, record in records.items() if record != undisturbed[name]]
        assert different == []
        self._say(f"{job_id} completed: {len(records)} records, one a request, all as in the undisturbed run")

    def _check_secrets(self) -> None:
        """No password is in what Docker shows, nor in the logs; no prompt is in the logs."""
        logs = self._project.run("logs", "--no-color")
        shown = "".join(docker("inspect", name.split()[1]) for name in self._project.remains())
        for user in ("producer", "worker", "admin"):
            assert self._project.secret(user) not in logs + shown
        assert "support tickets" not in logs
        num_lines = len(logs.splitlines())
        self._say(f"no password in what `docker inspect` shows, and none and no prompt in {num_lines} lines of logs")

    def _down(self) -> None:
        self._project.run("down", "--volumes", "--timeout", f"{STOP_GRACE_S:.0f}")
        assert self._project.remains() == []
        self._say("$ docker compose down --volumes: no container, network or volume is left")

    def _workers(self) -> Sequence[WorkerContainer]:
        return [WorkerContainer(name) for name in self._project.containers("worker")]

    def _wait_healthy(self, worker: WorkerContainer) -> None:
        self._transcript.wait(f"{worker.name} is healthy", lambda: worker.health == "healthy", START_TIMEOUT_S)

    def _wait_finished(self, client: BatchClient, job_id: str, share: float) -> None:
        """Until this share of the job has its records, and some has none yet."""
        self._transcript.wait(f"{share:.0%} of it are done", lambda: _finished(client, job_id) >= share, JOB_TIMEOUT_S)
        assert client.status(job_id).progress < 1, "done before it could be disturbed"

    def _show_ps(self) -> None:
        self._transcript.show(self._project.run("ps", "--all"))


def _finished(client: BatchClient, job_id: str) -> float:
    try:
        return client.status(job_id).progress
    except redis.RedisError:  # it is being restarted
        return 0.0


def _progress(status: JobStatus) -> str:
    return f"{status.status}, {status.request_counts.finished} of {status.request_counts.total} records"


def _seconds(timestamp: str) -> float:
    """Of Docker's times, which have nanoseconds: 2026-11-22T08:00:00.123456789Z."""
    return datetime.fromisoformat(f"{timestamp[:26].rstrip('Z')}+00:00").timestamp()


def walk(directory: Path, transcript: Transcript) -> None:
    """Everything, from the build to nothing left; files go into `directory`. Raises NoCompose."""
    port = free_port()
    with millrace_project({"REDIS_PORT": str(port)}) as project:
        Walkthrough(project, directory, port, transcript).run()


@contextmanager
def millrace_project(environment: Mapping[str, str], *files: str) -> Iterator[ComposeProject]:
    """compose.yaml with the changes for tests, and with other files on top. Raises NoCompose.

    torch comes from TORCH_INDEX where that is set, else from a wheel on this machine, else from PyTorch's index.
    """
    with _torch() as (for_wheels, index):
        name = f"millrace-test-{os.getpid()}"
        with compose_project(name, [*FILES, *files, *for_wheels], {**environment, **index}) as project:
            yield project


@contextmanager
def _torch() -> Iterator[tuple[list[str], Mapping[str, str]]]:
    wheel = None if "TORCH_INDEX" in os.environ else find_torch_wheel()
    if wheel is None:
        yield [], {}
    else:
        with served_index(wheel) as url:
            yield [WHEELS], {"TORCH_INDEX": url}


if __name__ == "__main__":
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory()))
        files = [stack.enter_context(Path(name).open("w")) for name in sys.argv[1:2]]
        walk(directory, Transcript(sys.stdout, *files))
