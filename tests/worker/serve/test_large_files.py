"""Large files over HTTP, in the memory of small ones. `--capture=no` shows rates and memory."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from openai import OpenAI

from tests.support.http_servers import chat_lines, is_open
from tests.support.processes import wait_until
from tests.support.redis_servers import free_port
from tests.support.registry import TestRegistry, ended_job, must_claim, ok
from tests.support.workers import COMMAND
from worker.records.record import BatchFile
from worker.registry.keys import UnitRef
from worker.schemas import JobState

MAX_GROWTH_MIB = 32
SHARD_LINES = 2_000
PUT_RECORDS = 200  # at once

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class ServerProcess:
    """A server in a process of its own, and OpenAI's client of it."""

    pid: int
    client: OpenAI

    @property
    def most_memory_mib(self) -> int:
        """The most that the process has had resident since it started."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) // 1024

    def download(self, file_id: str) -> tuple[int, int]:
        """The file's lines and bytes, none of them kept."""
        num_lines = num_bytes = 0
        with self.client.files.with_streaming_response.content(file_id) as content:
            for part in content.iter_bytes():
                num_lines += part.count(b"\n")
                num_bytes += len(part)
        return num_lines, num_bytes


@pytest.fixture
def server(redis_url: str) -> Iterator[ServerProcess]:
    port = free_port()
    with subprocess.Popen([*COMMAND, "serve", "--port", str(port), "--redis-url", redis_url]) as process:
        try:
            wait_until(lambda: is_open(port))
            with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=600) as client:
                yield ServerProcess(process.pid, client)
        finally:
            process.terminate()


@contextmanager
def _in_flat_memory(server: ServerProcess) -> Iterator[None]:
    """The server's memory has hardly grown at the block's end."""
    before_mib = server.most_memory_mib
    yield
    after_mib = server.most_memory_mib
    print(f"the server's memory {before_mib} MiB before, at most {after_mib}")
    assert after_mib - before_mib <= MAX_GROWTH_MIB


def _upload(client: OpenAI, path: Path) -> str:
    with path.open("rb") as stream:
        return client.files.create(file=stream, purpose="batch").id


def _create(client: OpenAI, file_id: str) -> None:
    client.batches.create(input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h")


def test_a_file_of_200_mb_goes_in_and_out_in_the_memory_of_a_small_one(server: ServerProcess, tmp_path: Path) -> None:
    path, small = tmp_path / "lines.jsonl", tmp_path / "small.jsonl"
    path.write_bytes(chat_lines("a" * 3_850) * 50_000)
    small.write_bytes(chat_lines("a"))
    _create(server.client, _upload(server.client, small))
    with _in_flat_memory(server):
        times_s = [time.monotonic()]
        file_id = _upload(server.client, path)
        times_s.append(time.monotonic())
        _create(server.client, file_id)
        times_s.append(time.monotonic())
        assert server.download(file_id) == (50_000, path.stat().st_size)
        times_s.append(time.monotonic())
    into_s, create_s, out_s = (after - before for before, after in pairwise(times_s))
    megabytes = path.stat().st_size / 1e6
    print(f"{megabytes:.0f} MB: in at {megabytes / into_s:.0f} MB/s, a batch of it in {create_s:.1f} s,", end=" ")
    print(f"out at {megabytes / out_s:.0f} MB/s")


def _answered_job(registry: TestRegistry, record: str, num_lines: int) -> str:
    """A job of so many lines, each with this answer, and as completed as one that a worker ran."""
    shards = [range(first, min(first + SHARD_LINES, num_lines)) for first in range(0, num_lines, SHARD_LINES)]
    job_id, leases = registry.running_job(*shards), registry.leases(lease_s=600.0)
    for number, shard in enumerate(shards):
        claim = must_claim(leases, UnitRef.shard(job_id, number))
        for first in range(0, len(shard), PUT_RECORDS):
            leases.put(claim, [ok(index, record) for index in shard[first : first + PUT_RECORDS]])
    assert registry.status(job_id).status is JobState.COMPLETED
    return job_id


def test_50_000_answers_go_out_in_the_memory_of_a_few(server: ServerProcess, registry: TestRegistry) -> None:
    head = '{"id":"a","custom_id":"a","response":{"status_code":200,"body":{"text":"'
    record = head + "a" * (1_996 - len(head)) + '"}}}'  # 2,000 bytes
    server.download(BatchFile.OUTPUT.id_of(ended_job(registry, {})))
    file_id = BatchFile.OUTPUT.id_of(_answered_job(registry, record, 50_000))
    with _in_flat_memory(server):
        began_s = time.monotonic()
        assert server.download(file_id) == (50_000, 50_000 * (len(record) + 1))
        took_s = time.monotonic() - began_s
    megabytes = 50_000 * (len(record) + 1) / 1e6
    print(f"50,000 answers, {megabytes:.0f} MB: {50_000 / took_s:,.0f}/s, {megabytes / took_s:.0f} MB/s")
