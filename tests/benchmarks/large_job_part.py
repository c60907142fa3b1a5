"""Submits or reads a large job in a process of its own, so that its memory can be measured.

`python -m tests.benchmarks.large_job_part submit URL FILE`, or `read URL JOB FILE`: prints its figures as JSON. Memory
is as Linux counts it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from settings import LimitSettings
from worker.cli.files import RecordPaths, record_output, write_records
from worker.client import BatchClient
from worker.lines.files import read_raw_lines


def rss_mib(pid: int | str = "self") -> float:
    """MiB of memory that this process has now."""
    return _field(pid, "VmRSS")


def peak_rss_mib(pid: int | str = "self") -> float:
    """MiB that this process had at most, since it began or since `forget_peak`.

    Not getrusage: its ru_maxrss begins with what the process had that started this one.
    """
    return _field(pid, "VmHWM")


def forget_peak(pid: int) -> None:
    """Reset the peak to what the process has now; see proc(5) on clear_refs."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _field(pid: int | str, name: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def submit(url: str, file: Path) -> dict[str, object]:
    """Submit a file as `millrace submit --strict` does."""
    with BatchClient(url) as client, file.open("rb") as source:
        before_mib, began_s = rss_mib(), time.perf_counter()
        lines = read_raw_lines(source, LimitSettings().max_prompt_bytes)
        job_id = client.submit(lines, strict=True, endpoint="/v1/chat/completions")
        wall_s = time.perf_counter() - began_s
    return {"job_id": job_id, "wall_s": wall_s, "before_mib": before_mib, "peak_mib": peak_rss_mib()}


def read(url: str, job_id: str, file: Path) -> dict[str, object]:
    """Read a job's results as `millrace results -o` does."""
    with BatchClient(url) as client, record_output(RecordPaths.of(str(file))) as write:
        before_mib, began_s = rss_mib(), time.perf_counter()
        write_records(client.results(job_id), write)
        wall_s = time.perf_counter() - began_s
    return {"wall_s": wall_s, "before_mib": before_mib, "peak_mib": peak_rss_mib()}


def main(arguments: list[str]) -> None:
    """Submit or read, as the first argument says, and print the figures."""
    if arguments[0] == "submit":
        figures = submit(arguments[1], Path(arguments[2]))
    else:
        figures = read(arguments[1], arguments[2], Path(arguments[3]))
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1:])
