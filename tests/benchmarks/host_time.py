"""Measures the host's part of a decode step: `python -m tests.benchmarks.host_time [--rows N] [--profile FILE]`.

All rows decode greedily over a null model, whose logits are there before they are asked for, so that what is left is
the interpreter: scheduling, planning, staging, sampling's small operations, tokens, text. Two ways: as on a GPU (a
step ahead, decode graphs, two copies; the replay does nothing) and as on a CPU (a step at a time, looking for shared
prefixes). Busy threads as a worker has them, waiting mostly and reading and writing some JSON, say what the
interpreter's lock costs. Milliseconds a step, medians: the thread's processor time, and by the clock.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from engine.engine import Engine
from engine.execution.decode_graphs import DecodeRun
from engine.models.decoder import DecoderModel, ForwardBatch, ForwardResult
from tests.support.engines import greedy_request, load_engine, load_static_engine
from tests.support.tiny_checkpoint import VOCAB_SIZE, make_checkpoint

PROMPT_TOKENS, SHARED_TOKENS, BLOCK_SIZE = 320, 64, 16
GOAL_MS = 2.0
NUM_THREADS, WAIT_S = 16, 0.005
RECORD = {"custom_id": "request-1", "response": {"status_code": 200, "body": {"text": "x" * 1500, "ids": [7] * 60}}}

Times = tuple[float, float]  # processor and wall, ms a step


class NullGraphs:
    """A GraphBackend whose replays leave the logits as they are."""

    def capture(self, run: DecodeRun, kv_len_bounds: tuple[int, ...]) -> DecodeRun:
        """See `GraphBackend.capture`."""
        return lambda _: None


def null_forward(self: DecoderModel, batch: ForwardBatch, *_: object) -> ForwardResult:
    """In place of `DecoderModel.forward`: rows of the same random logits whatever the tokens."""
    return ForwardResult(_LOGITS[: batch.logits_indices.shape[0]], ())


_LOGITS = torch.randn((1024, VOCAB_SIZE), generator=torch.Generator().manual_seed(0))


def make_engine(path: Path, way: str, rows: int, num_steps: int) -> Engine:
    """An engine in which `rows` sequences are about to decode `num_steps` steps."""
    blocks = rows * (-(-(PROMPT_TOKENS + num_steps) // BLOCK_SIZE) + 1) + 1
    values: dict[str, object] = {
        "engine.max_num_seqs": rows,
        "engine.max_num_batched_tokens": 8192,
        "engine.kv_cache.num_blocks": blocks,
        "engine.async_scheduling": "on" if way == "gpu" else "off",
        "engine.shared_prefix.enabled": "off" if way == "gpu" else "on",
    }
    engine = load_static_engine(path, NullGraphs(), values, (rows,)) if way == "gpu" else load_engine(path, values)
    rng = random.Random(0)
    shared = [rng.randrange(VOCAB_SIZE - 10) for _ in range(SHARED_TOKENS)]
    for number in range(rows):
        prompt = [*shared, *(rng.randrange(VOCAB_SIZE - 10) for _ in range(PROMPT_TOKENS - SHARED_TOKENS))]
        engine.add_request(greedy_request(f"request {number}", prompt, max_tokens=num_steps))
    while engine.step_size != (rows, rows):
        engine.step()
    return engine


def run_steps(engine: Engine, num_steps: int) -> Times:
    """Medians over so many steps."""
    processor, wall = [], []
    for _ in range(num_steps):
        before = time.thread_time(), time.perf_counter()
        engine.step()
        processor.append(time.thread_time() - before[0])
        wall.append(time.perf_counter() - before[1])
    return 1000 * statistics.median(processor), 1000 * statistics.median(wall)


@contextmanager
def busy_threads(count: int) -> Iterator[None]:
    """So many threads that wait most of the time, then read and write a record."""
    is_over = threading.Event()

    def work() -> None:
        while not is_over.wait(WAIT_S):
            json.loads(json.dumps(RECORD))

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def measure(path: Path, way: str, options: argparse.Namespace) -> tuple[Times, Times]:
    """Alone and beside busy threads, by turns."""
    rounds, each = options.rounds, options.steps
    alone, beside = [], []
    engine = make_engine(path, way, options.rows, 20 + 2 * rounds * each + 50)
    run_steps(engine, 20)
    for _ in range(rounds):
        alone.append(run_steps(engine, each))
        with busy_threads(NUM_THREADS):
            beside.append(run_steps(engine, each))
    if options.profile is not None:
        with cProfile.Profile() as profile:
            run_steps(engine, 40)
        profile.dump_stats(f"{options.profile}.{way}")
    engine.close()
    return _median(alone), _median(beside)


def _median(times: Sequence[Times]) -> Times:
    return statistics.median(t[0] for t in times), statistics.median(t[1] for t in times)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table. Returns 0 if a step takes no more processor time than the goal, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.host_time", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=256, metavar="N", help="sequences that decode together")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="alternations of alone and beside threads")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps in each half of a round")
    parser.add_argument("--profile", metavar="FILE", help="write cProfile's counts of 40 more steps to FILE.WAY")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(__doc__)
    print(f"| {options.rows} rows | processor | wall | beside {NUM_THREADS} threads: processor | wall |")
    print("|---|---|---|---|---|")
    slowest = 0.0
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = make_checkpoint(Path(folder) / "tiny", "qwen3", max_position_embeddings=4096)
        patch.setattr(DecoderModel, "forward", null_forward)
        for way in ("gpu", "cpu"):
            alone, beside = measure(path, way, options)
            print(f"| as on a {way.upper()} | " + " | ".join(f"{ms:.2f}" for ms in (*alone, *beside)) + " |")
            slowest = max(slowest, alone[0])
    print(f"\ngoal: {GOAL_MS} ms of processor time")
    return 0 if slowest <= GOAL_MS else 1


if __name__ == "__main__":
    sys.exit(main())
