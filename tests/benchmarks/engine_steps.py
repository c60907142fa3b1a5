"""Measures what the engine's own work costs, with tiny models or none: `python -m tests.benchmarks.engine_steps WHAT`.

host: a decode step of `--rows` greedy sequences over a null model, whose logits are there before they are asked for, so
that what is left is the interpreter: scheduling, planning, staging, sampling's small operations, tokens, text. As on a
GPU (a step ahead, decode graphs, two copies; a replay does nothing) and as on a CPU (a step at a time, looking for
shared prefixes). Beside it threads as a worker has them, waiting mostly and reading and writing some JSON, say what the
interpreter's lock costs. Milliseconds a step, medians: the thread's processor time, and by the clock.

speculation: requests of 96 tokens behind 256, 1 and 8 at a time; 8 layers of width 512 that count upwards, one thread;
what the outputs are to the prompts decides what prompt lookup finds. With engine.speculation over without, by turns,
`--rounds` times. Tokens must be equal.

duplicates: 200 shuffled prompts of one tenant, of which 60 equal one of the other 140; greedy and seeded in turn; one
thread, 16 sequences at a time. Tokens are those that the model's forward passes take in.

    work = tokens of the 200 prompts / tokens of the 140 different ones alone; 1.00 is work done once
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.engine import Engine
from engine.execution.batch import ForwardItem
from engine.execution.decode_graphs import DecodeRun
from engine.models.decoder import DecoderModel, ForwardBatch, ForwardResult
from engine.request import Request
from engine.sampling_params import SamplingParams
from tests.support.engines import OpenEngine, greedy_request, load_engine, load_static_engine, run_all, tokens_of
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

    def capture_after(self, run: Callable[[], None]) -> Callable[[], None]:
        """See `GraphBackend.capture_after`."""
        return lambda: None


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


def measure_host(path: Path, way: str, options: argparse.Namespace) -> tuple[Times, Times]:
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


NUM_DIFFERENT, NUM_DUPLICATES = 140, 60
NUM_TRIALS = 3


def make_duplicates(rng: random.Random) -> tuple[list[Request], list[Request]]:
    """Requests that all differ, and the same together with their duplicates, shuffled."""
    different = [
        Request(
            str(number),
            [rng.randrange(300) for _ in range(rng.randint(20, 200))],
            SamplingParams(max_tokens=rng.randint(16, 64), temperature=number % 2, seed=number, ignore_eos=True),
        )
        for number in range(NUM_DIFFERENT)
    ]
    again = [replace(rng.choice(different), request_id=f"again {number}") for number in range(NUM_DUPLICATES)]
    everything = [*different, *again]
    rng.shuffle(everything)
    return different, everything


def run_counted(engine: OpenEngine, requests: Sequence[Request]) -> tuple[int, float, dict[str, list[int]]]:
    """Run the requests: tokens that the forward passes took in, seconds, and each request's tokens."""
    num_tokens = 0
    execute = engine.parts.executor.execute

    def counting(items: Sequence[ForwardItem], *others: Any) -> object:
        nonlocal num_tokens
        num_tokens += sum(len(item.token_ids) for item in items)
        return execute(items, *others)

    engine.parts.executor.execute = counting  # type: ignore[method-assign,assignment]  # a hook of this benchmark alone
    begin = time.perf_counter()
    outputs = run_all(engine, requests)
    seconds = time.perf_counter() - begin
    engine.parts.executor.execute = execute  # type: ignore[method-assign]  # the hook is taken out again
    return num_tokens, seconds, {name: tokens_of(output) for name, output in outputs.items()}


def measure_duplicates(path: Path, trial: int) -> dict[str, dict[str, float]]:
    """Work and time of each way, each in an engine of its own so that none finds another's KV."""
    different, everything = make_duplicates(random.Random(trial))
    ways = {
        "140 different, alone": ("on", different),
        "200, computed once": ("on", everything),
        "200, engine.deduplicate=off": ("off", everything),
    }
    found: dict[str, dict[str, float]] = {}
    answers: list[dict[str, list[int]]] = []
    for name, (switch, requests) in ways.items():
        engine = load_engine(path, {"engine.deduplicate": switch, "engine.max_num_seqs": 16})
        num_tokens, seconds, tokens = run_counted(engine, requests)
        engine.close()
        found[name] = {"tokens": num_tokens, "seconds": seconds}
        answers.append(tokens)
    if answers[1] != answers[2]:
        raise RuntimeError("duplicates that are computed once end otherwise than those that are not")
    alone = found["140 different, alone"]
    return {
        name: {
            "tokens": row["tokens"],
            "work": row["tokens"] / alone["tokens"],
            "time": row["seconds"] / alone["seconds"],
        }
        for name, row in found.items()
    }


@dataclass(frozen=True)
class Run:
    """Some requests on an engine: their tokens, and what they cost."""

    tokens: dict[str, list[int]]
    processor_s: float
    num_steps: int
    accepted: int
    drafted: int


def timed_run(engine: OpenEngine, requests: Sequence[Request]) -> Run:
    """Run the requests and count."""
    before, began = engine.stats(), time.process_time()
    outputs = run_all(engine, requests)
    processor_s, after = time.process_time() - began, engine.stats()
    return Run(
        {name: tokens_of(output) for name, output in outputs.items()},
        processor_s,
        after.num_steps - before.num_steps,
        after.accepted_tokens - before.accepted_tokens,
        after.drafted_tokens - before.drafted_tokens,
    )


def make_counting_model(path: Path) -> Path:
    """A model of 8 layers of width 512 that answers each token with the next id: it goes on as a rising prompt does."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "head_dim": 64}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    make_checkpoint(path, "qwen3", initializer_range=0.02, **sizes, **heads)
    file = path / "model.safetensors"
    weights = load_file(file)
    embedding = 50 * weights["model.embed_tokens.weight"]  # the layers change little of it
    weights |= {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.roll(1, 0).contiguous()}
    save_file(weights, file, {"format": "pt"})
    return path


def make_counting(outputs: str, count: int) -> list[Request]:
    """Greedy requests of 96 tokens, which count on from the last token of 256 to 320."""
    rng = random.Random(outputs)
    requests = []
    for number in range(count):
        ids = list(range(rng.randrange(100), 290))
        if outputs == "copy the prompt":
            prompt = [*ids, *rng.choices(ids, k=max(0, 256 - len(ids))), *ids[:4]]
        elif outputs == "copy nothing":
            prompt = [*(token for token in reversed(range(256))), rng.randrange(180)]
        else:  # each two tokens occurred before, and were followed by another
            prompt = [*(token for first in range(60, 160) for token in (first, first + 1, 300)), 60]
        params = SamplingParams(max_tokens=96, temperature=0.0, ignore_eos=True)
        requests.append(Request(str(number), prompt, params))
    return requests


def report_speculation(folder: Path, options: argparse.Namespace) -> bool:
    """Print the table; whether drafts changed no token, and saved time where outputs copy."""
    path = make_counting_model(folder / "model")
    print("| outputs | running | tokens a sequence and step | of drafts accepted | processor time: with / without |")
    print("|---|---|---|---|---|")
    copying: list[float] = []
    for outputs in ("copy the prompt", "copy nothing", "differ from each draft"):
        for running in (1, 8):
            requests = make_counting(outputs, running)
            ratios, last = zip(*(compare(path, requests) for _ in range(options.rounds)), strict=True)
            num_tokens = 96 * running
            accepted = f"{last[-1].accepted} of {last[-1].drafted}"
            a_step = num_tokens / (num_tokens - last[-1].accepted)
            middle = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"| {outputs} | {running} | {a_step:.2f} | {accepted} | {middle} |", flush=True)
            copying += ratios if outputs == "copy the prompt" else []
    return max(copying) < 1


def compare(path: Path, requests: Sequence[Request]) -> tuple[float, Run]:
    """Time with drafts over that without, and the run with them. Raises where they changed a token."""
    runs = []
    for switch in ("off", "on"):
        engine = load_engine(path, {"engine.speculation.enabled": switch, "engine.deduplicate": "off"})
        runs.append(timed_run(engine, requests))
        engine.close()
    without, with_drafts = runs
    if without.tokens != with_drafts.tokens:
        raise RuntimeError("drafts changed tokens")
    return with_drafts.processor_s / without.processor_s, with_drafts


def report_duplicates(folder: Path, options: argparse.Namespace) -> bool:
    """Print the table; whether the work was done once, to 1 %."""
    path = make_checkpoint(folder / "tiny", "qwen3", initializer_range=0.6)
    trials = [measure_duplicates(path, trial) for trial in range(NUM_TRIALS)]
    print("| requests | forward tokens | work | time |")
    print("|---|---|---|---|")
    for name in trials[0]:
        mean = {key: statistics.mean(trial[name][key] for trial in trials) for key in trials[0][name]}
        print(f"| {name} | {mean['tokens']:.0f} | {mean['work']:.3f} | {mean['time']:.2f} |")
    return all(trial["200, computed once"]["work"] <= 1.01 for trial in trials)


def report_host(folder: Path, options: argparse.Namespace) -> bool:
    """Print the table; whether a step takes no more processor time than the goal."""
    torch.set_num_threads(1)
    path = make_checkpoint(folder / "tiny", "qwen3", max_position_embeddings=4096)
    print(f"| {options.rows} rows | processor | wall | beside {NUM_THREADS} threads: processor | wall |")
    print("|---|---|---|---|---|")
    slowest = 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecoderModel, "forward", null_forward)
        for way in ("gpu", "cpu"):
            alone, beside = measure_host(path, way, options)
            print(f"| as on a {way.upper()} | " + " | ".join(f"{ms:.2f}" for ms in (*alone, *beside)) + " |")
            slowest = max(slowest, alone[0])
    print(f"\ngoal: {GOAL_MS} ms of processor time")
    return slowest <= GOAL_MS


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables asked for. Returns 0 if all goals are reached, else 1."""
    reports = {"host": report_host, "speculation": report_speculation, "duplicates": report_duplicates}
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.engine_steps",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("what", choices=reports)
    parser.add_argument("--rows", type=int, default=256, metavar="N", help="host: sequences that decode together")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="host, speculation: turns of the two ways")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="host: steps in each half of a round")
    parser.add_argument("--profile", metavar="FILE", help="host: write cProfile's counts of 40 steps to FILE.WAY")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        return 0 if reports[options.what](Path(folder), options) else 1


if __name__ == "__main__":
    sys.exit(main())
