"""Real workers: `millrace worker` processes, warm ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.millrace import CLI
from tests.support.wait_until import wait_until
from tests.support.warm_interpreter import warm_interpreter
from tests.support.warm_process import WarmProcess
from worker.client import BatchClient

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
ONE_THREAD = ("--set", "engine.num_threads=1")
QUICK_HEARTBEATS = ("--set", "worker.renew_interval_s=0.2")  # for who waits to see a figure in one


@contextmanager
def running_workers(redis_url: str, model: Path, count: int, *options: str) -> Iterator[list[WarmProcess]]:
    """Start workers, wait until Redis knows them all, and at the end tell them to stop: each must exit 0."""
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
