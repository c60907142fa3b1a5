"""Runs `millrace` as users do: the command, real workers, and workers with the fake engine or one that is held.

This module is also the program of a worker with the fake engine:
`python -m tests.support.workers '{"slots": 3}' KEY=VALUE ...`, and with a model's, held after some answers:
`python -m tests.support.workers '{"held_after": 20}' model.path=DIR ...`
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, cast

from engine.request import RequestOutput
from settings import EffectiveSettings, load_settings, parse_assignments
from tests.support.fake_engine import FakeEngine
from tests.support.processes import WarmProcess, wait_until, warm_interpreter
from worker.celery_worker import run_worker
from worker.client import BatchClient
from worker.requests.step_engine import StepEngine
from worker.runtime.log_setup import configure_logging

ROOT = Path(__file__).resolve().parents[2]
_CODE = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import worker.cli.main as m; m.main()"
COMMAND = [sys.executable, "-c", _CODE]  # with all of its imports
CLI = "worker.cli.main"  # for `warm_interpreter`
PIPE_BYTES = 65_536  # what a pipe takes at once

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
ONE_THREAD = ("--set", "engine.num_threads=1")
QUICK_HEARTBEATS = ("--set", "worker.renew_interval_s=0.2")  # for tests that wait for a figure in a heartbeat

FAKE_WORKER_STOP_TIMEOUT_S = 30.0
HELD_STEP_S = 0.02

# Times short enough for a test.
QUICK = {
    "worker.lease_s": "1.0",
    "worker.renew_interval_s": "0.2",
    "worker.reap_interval_s": "0.2",
    "worker.reap_grace_s": "0.5",
    "worker.drain_timeout_s": "5",
    "worker.concurrency": "4",
    "worker.shard_size": "10",
}

README = Path(__file__).resolve().parents[2] / "README.md"


def millrace(
    *arguments: str | Path, stdin: bytes = b"", timeout_s: float = 100.0
) -> subprocess.CompletedProcess[bytes]:
    """Run `millrace ARGUMENTS` to its end in a warm process; `stdin` comes by a pipe, PIPE_BYTES at most."""
    assert len(stdin) <= PIPE_BYTES
    read, write = os.pipe()
    os.write(write, stdin)
    os.close(write)
    with TemporaryFile() as stdout, TemporaryFile() as stderr:
        process = warm_interpreter().start(CLI, list(map(str, arguments)), stdout, stderr=stderr, stdin=read)
        os.close(read)
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
        return subprocess.CompletedProcess(arguments, code, *(_content(stream) for stream in (stdout, stderr)))


def _content(stream: IO[bytes]) -> bytes:
    stream.seek(0)
    return stream.read()


@contextmanager
def running_workers(redis_url: str, model: Path, count: int, *options: str) -> Iterator[list[WarmProcess]]:
    """Run workers for the length of the block: Redis knows them all when it begins, and each must exit 0 at its end."""
    with ExitStack() as stack, BatchClient(redis_url) as client:
        logs = [stack.enter_context((model.parent / f"worker-{i}.log").open("wb")) for i in range(count)]
        arguments = ["worker", "--model", str(model), "--redis-url", redis_url, *ONE_THREAD, *options]
        workers = [warm_interpreter().start(CLI, arguments, log) for log in logs]
        try:
            wait_until(lambda: len(client.workers()) == count, timeout_s=START_TIMEOUT_S)
            yield workers
        finally:
            for worker in workers:
                worker.terminate()
            codes = [worker.wait(timeout=STOP_TIMEOUT_S) for worker in workers]
    assert codes == [0] * count


class WorkerProcesses:
    """Starts workers and sees to it that none outlives the test."""

    def __init__(self, redis_url: str, directory: Path) -> None:
        self._redis_url = redis_url
        self._directory = directory
        self._processes: list[WarmProcess] = []

    def start(self, *, engine: Mapping[str, object] | None = None, **settings: str) -> WarmProcess:
        """Start a worker; settings as `worker__lease_s="2"`, over QUICK."""
        values = {**QUICK, **{name.replace("__", "."): value for name, value in settings.items()}}
        arguments = [f"{key}={value}" for key, value in {"redis.url": self._redis_url, **values}.items()]
        program = "tests.support.workers"
        with self._log_path(len(self._processes)).open("wb") as log:
            process = warm_interpreter().start(program, [json.dumps(engine or {}), *arguments], log)
        self._processes.append(process)
        return process

    def wait_up(self, client: BatchClient) -> None:
        """Wait until every worker that was started has sent its heartbeat."""
        wait_until(lambda: len(client.workers()) >= len(self._processes), timeout_s=START_TIMEOUT_S)

    def log(self, number: int = 0) -> str:
        """What the worker wrote so far."""
        return self._log_path(number).read_text()

    def kill_all(self) -> None:
        """Kill what still runs."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait(FAKE_WORKER_STOP_TIMEOUT_S)

    def _log_path(self, number: int) -> Path:
        return self._directory / f"worker-{number}.log"


@contextmanager
def worker_processes(redis_url: str, directory: Path) -> Iterator[WorkerProcesses]:
    """Workers of one test."""
    workers = WorkerProcesses(redis_url, directory)
    try:
        yield workers
    finally:
        workers.kill_all()


class HeldEngine:
    """A model's engine that stands still once it has given so many answers and has others under way.

    It goes on, for good, when a request is aborted. Until then it has its sequences and their KV, on any machine.
    """

    def __init__(self, engine: StepEngine, held_after: int) -> None:
        self._engine = engine
        self._held_after = held_after
        self._num_answers = 0
        self._goes_on = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def abort(self, request_id: str) -> bool:
        self._goes_on = True
        return self._engine.abort(request_id)

    def step(self) -> list[RequestOutput]:
        if not self._goes_on and self._num_answers >= self._held_after and self._engine.stats().num_running:
            time.sleep(HELD_STEP_S)
            return []
        outputs = self._engine.step()
        self._num_answers += len(outputs)
        return outputs


def python_block(after: str) -> str:
    """The first fenced Python block of the README behind the words `after`."""
    text = README.read_text()
    start = text.index(after)
    match = re.search(r"```python\n(.*?)```", text[start:], re.DOTALL)
    assert match is not None, f"no Python block after {after!r}"
    return match[1]


def replace_line(code: str, begins_with: str, line: str) -> str:
    """`code` with the only line that begins like this replaced."""
    pattern = re.compile(rf"^{re.escape(begins_with)}.*$", re.MULTILINE)
    assert len(pattern.findall(code)) == 1, f"not one line begins with {begins_with!r}"
    return pattern.sub(lambda _: line, code)


def main() -> int:
    """Run a worker whose engine and settings the command line gives."""
    engine_options = json.loads(sys.argv[1])
    effective = load_settings(parse_assignments(sys.argv[2:]), environ={})
    configure_logging(effective.settings.log)

    def load(effective: EffectiveSettings) -> StepEngine:
        if "held_after" not in engine_options:
            return FakeEngine(**engine_options)
        from engine.loading.load import load_engine

        return cast(StepEngine, HeldEngine(load_engine(effective), **engine_options))

    return run_worker(effective, load)


if __name__ == "__main__":
    sys.exit(main())
