"""Measures how processor time grows with size on one small model, and a process' memory while requests wait.

One thread's processor time, not the clock's: on a machine that other programs use, the clock shows their bends.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from engine.engine import Engine
from tests.benchmarks.peers.floor import Arithmetic, ModelCost
from tests.benchmarks.peers.workload import Workload
from tests.support.engines import greedy_request, load_engine, run_all
from tests.support.processes import wait_until
from tests.support.redis_servers import free_port, private_redis
from tests.support.tiny_checkpoint import decoder_config, make_checkpoint
from tests.support.workers import COMMAND, running_workers
from worker.client import BatchClient

OWN_TOKENS = "own prompt tokens"  # the others of 512 are the same in all requests

SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "initializer_range": 0.02,
}
NUM_IDS = 256  # the tokenizer's bytes
NUM_BLOCKS = 8192  # 131,072 tokens, 270 MB: nothing is preempted

PROMPT_TOKENS, MAX_TOKENS = 128, 64  # 64 at a time take a second: most of a thousand still wait when looked at
OPTIONS = ("--set", "engine.num_threads=1", "--set", "engine.kv_cache.num_blocks=1000")  # 64 requests need 768
START_TIMEOUT_S = 60.0
SETTLE_S = 4.0  # after the first results, or the job's start


@dataclass(frozen=True)
class Axis:
    """A series of workloads that differ in one number."""

    name: str
    sizes: tuple[int, ...]
    workload: Callable[[int], Workload]


def _unshared(num_requests: int, prompt_tokens: int, max_tokens: int) -> Workload:
    name = f"{num_requests} requests of {prompt_tokens} + {max_tokens} tokens"
    return Workload(name, "small", 0, 0, prompt_tokens, num_requests, max_tokens)


def _one_prefix(own_tokens: int) -> Workload:
    name = f"64 requests of 512 + 16 tokens, {own_tokens} of the prompt its own"
    return Workload(name, "small", 1, 512 - own_tokens, own_tokens, 64, 16)


# Requests share nothing on the first three axes, 283,000 tokens a round; on the last they share prefixes, so that
# 73,000 of its 203,000 tokens are computed.
AXES = (
    Axis("requests", (16, 64, 256, 1024), lambda size: _unshared(size, 64, 16)),
    Axis("prompt tokens", (128, 256, 512, 1024, 2048, 4096), lambda size: _unshared(16, size, 8)),
    Axis("output tokens", (16, 32, 64, 128, 256, 512), lambda size: _unshared(32, 64, size)),
    Axis(OWN_TOKENS, (16, 32, 64, 128, 256, 512), _one_prefix),
)


@dataclass(frozen=True)
class ScalingPoint:
    """One size's processor time, the median of the rounds."""

    axis: str
    size: int
    num_tokens: int  # read and written by all requests
    seconds: float
    flop: float  # of products and attention

    @property
    def us_per_token(self) -> float:
        """Microseconds a token."""
        return self.seconds / self.num_tokens * 1e6

    @property
    def flop_per_token(self) -> float:
        """FLOP a token; attention's grow with the length of the context."""
        return self.flop / self.num_tokens


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """b of the least-squares line log cost = a + b log size: 1 where cost is proportional to size."""
    xs, ys = [math.log(size) for size in sizes], [math.log(cost) for cost in costs]
    x_mean, y_mean = fmean(xs), fmean(ys)
    spread = sum((x - x_mean) ** 2 for x in xs)
    return sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / spread


def small_model(directory: Path) -> Path:
    """Write the model: 4 layers of width 256, float32."""
    return make_checkpoint(directory / "small", "qwen3", **SHAPE)


def measure(model: Path, axes: Sequence[Axis], rounds: int) -> list[ScalingPoint]:
    """Run every size once a round. The first size is run once before, to warm up."""
    cost = ModelCost.of(decoder_config(model))
    engine = load_engine(model, {"engine.num_threads": 1, "engine.kv_cache.num_blocks": NUM_BLOCKS})
    loads = {(axis.name, size): axis.workload(size) for axis in axes for size in axis.sizes}
    _seconds(engine, next(iter(loads.values())), -1)
    seconds = [{key: _seconds(engine, load, number) for key, load in loads.items()} for number in range(rounds)]
    engine.close()
    return [
        ScalingPoint(
            *key,
            num_tokens=load.num_requests * (load.prompt_tokens + load.max_tokens),
            seconds=median(round_s[key] for round_s in seconds),
            flop=sum(Arithmetic(load, cost).total()),
        )
        for key, load in loads.items()
    ]


def _seconds(engine: Engine, workload: Workload, seed: int) -> float:
    requests = [
        greedy_request(str(number), [token_id % NUM_IDS for token_id in prompt], workload.max_tokens)
        for number, prompt in enumerate(workload.prompts(seed))
    ]
    start_s = time.process_time()
    run_all(engine, requests)
    return time.process_time() - start_s


@dataclass(frozen=True)
class WaitingMemory:
    """The memory of one process while requests wait in it."""

    process: str  # "millrace run" or "worker"
    num_waiting: int  # of the file or job, those that run included
    resident_bytes: int
    peak_bytes: int  # the most since it began


def memory_of_run(model: Path, num_requests: int) -> WaitingMemory:
    """Measure `millrace run` on a file of `num_requests` lines."""
    with tempfile.TemporaryDirectory() as name:
        lines, results = _write_lines(Path(name), num_requests), Path(name) / "results.jsonl"
        command = [*COMMAND, "run", "-i", str(lines), "-o", str(results), "--model", str(model), *OPTIONS]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_until(lambda: _has_begun(results), timeout_s=START_TIMEOUT_S)
            time.sleep(SETTLE_S)
            return _read("millrace run", num_requests, process.pid)
        finally:
            process.kill()
            process.wait()


def memory_of_worker(model: Path, num_requests: int) -> WaitingMemory:
    """Measure a worker with one job of `num_requests` lines."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(private_redis(directory, port=free_port()))
        (worker,) = stack.enter_context(running_workers(url, model, 1, *OPTIONS))
        client = stack.enter_context(BatchClient(url))
        with _write_lines(directory, num_requests).open("rb") as lines:
            job_id = client.submit(lines)
        wait_until(lambda: client.status(job_id).request_counts.finished > 0, timeout_s=START_TIMEOUT_S)
        time.sleep(SETTLE_S)
        memory = _read("worker", num_requests, worker.pid)
        client.cancel(job_id)
        return memory


def _has_begun(results: Path) -> bool:
    return results.exists() and results.stat().st_size > 0


def _write_lines(directory: Path, count: int) -> Path:
    path, generator = directory / "lines.jsonl", random.Random(count)
    with path.open("w") as file:
        for _ in range(count):
            prompt = [generator.randrange(256) for _ in range(PROMPT_TOKENS)]
            body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
            file.write(json.dumps(body) + "\n")
    return path


def _read(process: str, num_waiting: int, pid: int) -> WaitingMemory:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    resident, peak = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return WaitingMemory(process, num_waiting, resident, peak)
