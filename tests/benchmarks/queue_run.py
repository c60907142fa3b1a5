"""One run: a private Redis, real worker processes, jobs through the client."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from redis import Redis

from tests.benchmarks.cpu_time import cpu_time_s
from tests.benchmarks.queue_lines import queue_lines
from tests.benchmarks.queue_measurement import QueueMeasurement
from tests.benchmarks.queue_workers import queue_workers
from tests.support.free_port import free_port
from tests.support.redis_server import private_redis
from tests.support.tiny_tokenizer import make_tokenizer
from tests.support.wait_until import wait_until
from worker.client import BatchClient
from worker.records.record import has_failed

WARM_UP_PROMPTS = 1000  # a worker: imports, connections, caches
START_TIMEOUT_S = 60.0
RUN_TIMEOUT_S = 120.0


def run_queue(num_workers: int, num_prompts: int) -> QueueMeasurement:
    """Measure one job for each worker, `num_prompts` prompts in all."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_tokenizer(directory / "model")
        with private_redis(directory, port=free_port()) as url, BatchClient(url) as client:
            with Redis.from_url(url) as redis:
                redis_pid = int(redis.info("server")["process_id"])
            with queue_workers(url, directory, num_workers) as pids:
                wait_until(lambda: len(client.workers()) == num_workers, timeout_s=START_TIMEOUT_S)
                for job_id in _submit_together(client, [WARM_UP_PROMPTS] * num_workers, lambda: None):
                    client.wait(job_id, RUN_TIMEOUT_S)
                return _measure(client, pids, redis_pid, num_prompts)


def _measure(client: BatchClient, worker_pids: Sequence[int], redis_pid: int, num_prompts: int) -> QueueMeasurement:
    staged: list[tuple[float, float]] = []
    workers_s, redis_s, own_s = cpu_time_s(worker_pids), cpu_time_s([redis_pid]), time.process_time()
    sizes = _parts(num_prompts, len(worker_pids))
    job_ids = _submit_together(client, sizes, lambda: staged.append((cpu_time_s([redis_pid]), time.process_time())))
    jobs = [client.wait(job_id, RUN_TIMEOUT_S) for job_id in job_ids]
    worker_cpu_s, redis_end_s = cpu_time_s(worker_pids) - workers_s, cpu_time_s([redis_pid])
    reading_s = time.process_time()
    _check_records(client, job_ids, num_prompts)
    began = min(job.created_at for job in jobs)
    return QueueMeasurement(
        num_workers=len(worker_pids),
        num_prompts=num_prompts,
        planning_s=max(job.in_progress_at or began for job in jobs) - began,
        total_s=max(job.finished_at or began for job in jobs) - began,
        worker_cpu_s=worker_cpu_s,
        redis_cpu_s=redis_end_s - staged[0][0],
        submit_cpu_s=staged[0][1] - own_s,
        submit_redis_cpu_s=staged[0][0] - redis_s,
        results_cpu_s=time.process_time() - reading_s,
    )


def _submit_together(client: BatchClient, sizes: Sequence[int], on_staged: Callable[[], None]) -> list[str]:
    """Submit a job of each size; none is accepted before the lines of all are on their way, when `on_staged` runs."""
    barrier = threading.Barrier(len(sizes), action=on_staged)

    def lines(num_lines: int) -> Iterator[bytes]:
        yield from queue_lines(num_lines)
        barrier.wait(RUN_TIMEOUT_S)

    with ThreadPoolExecutor(len(sizes)) as pool:
        return list(pool.map(lambda size: client.submit(lines(size)), sizes))


def _check_records(client: BatchClient, job_ids: Sequence[str], num_prompts: int) -> None:
    """Read every record: a run that lost a prompt, or failed one, has measured something else."""
    records = [record for job_id in job_ids for record in client.results(job_id)]
    num_good = sum(not has_failed(record) for record in records)
    if num_good != num_prompts or len(records) != num_prompts:
        raise AssertionError(f"{len(records)} records, {num_good} of them good, of {num_prompts} prompts")


def _parts(total: int, count: int) -> list[int]:
    return [total // count + (position < total % count) for position in range(count)]
