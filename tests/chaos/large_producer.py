"""Submits one large job from a process of its own: `python -m tests.chaos.large_producer URL PROMPTS BYTES`.

Prints its figures as JSON. Its lines come from a generator, its results are read while the job runs.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from worker.client import BatchClient

STATUS_INTERVAL_S = 0.02


def main(url: str, num_prompts: int, prompt_bytes: int) -> None:
    """Submit, then follow the results on one thread and ask for the status on another."""
    with BatchClient(url) as client:
        before_kb = _peak_kb()
        began_s = time.perf_counter()
        job_id = client.submit(_lines(num_prompts, prompt_bytes))
        submit_s = time.perf_counter() - began_s
        calls_s: list[float] = []
        done = threading.Event()
        asking = threading.Thread(target=_ask, args=(client, job_id, calls_s, done))
        asking.start()
        num_records, finished_at_first = 0, -1
        for _ in client.results(job_id, follow=True):
            if num_records == 0:
                finished_at_first = client.status(job_id).request_counts.finished
            num_records += 1
        done.set()
        asking.join()
        figures = {
            "job_id": job_id,
            "submit_s": round(submit_s, 2),
            "total_s": round(time.perf_counter() - began_s, 2),
            "growth_mb": round((_peak_kb() - before_kb) / 1024, 1),
            "num_records": num_records,
            "finished_at_first_record": finished_at_first,
            "num_status_calls": len(calls_s),
            "median_status_s": round(statistics.median(calls_s), 5),
            "p99_status_s": round(statistics.quantiles(calls_s, n=100)[98], 5),
            "worst_status_s": round(max(calls_s), 5),
        }
    print(json.dumps(figures))


def _lines(num_prompts: int, prompt_bytes: int) -> Iterator[dict[str, str]]:
    for number in range(num_prompts):
        yield {"prompt": f"prompt {number} ".ljust(prompt_bytes, "x")}


def _ask(client: BatchClient, job_id: str, calls_s: list[float], done: threading.Event) -> None:
    while not done.wait(STATUS_INTERVAL_S):
        began_s = time.perf_counter()
        client.status(job_id)
        calls_s.append(time.perf_counter() - began_s)


def _peak_kb() -> int:
    # Not getrusage: on Linux its ru_maxrss begins with what the process had that started this one.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
