"""Measures the work that duplicates cost: `python -m tests.benchmarks.duplicates [--trials N] [--json FILE]`.

200 shuffled prompts of one tenant, of which 60 equal one of the other 140; greedy and seeded in turn; a tiny
model, one thread, 16 sequences at a time. Tokens are those that the model's forward passes take in.

    work = tokens of the 200 prompts / tokens of the 140 different ones alone; 1.00 is work done once
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine.execution.batch import ForwardItem
from engine.request import Request
from engine.sampling_params import SamplingParams
from tests.support.engines import OpenEngine, load_engine, run_all, tokens_of
from tests.support.tiny_checkpoint import make_checkpoint

NUM_DIFFERENT, NUM_DUPLICATES = 140, 60
VOCAB_SIZE = 300


def make_requests(rng: random.Random) -> tuple[list[Request], list[Request]]:
    """Requests that all differ, and the same together with their duplicates, shuffled."""
    different = [
        Request(
            str(number),
            [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(20, 200))],
            SamplingParams(max_tokens=rng.randint(16, 64), temperature=number % 2, seed=number, ignore_eos=True),
        )
        for number in range(NUM_DIFFERENT)
    ]
    again = [replace(rng.choice(different), request_id=f"again {number}") for number in range(NUM_DUPLICATES)]
    everything = [*different, *again]
    rng.shuffle(everything)
    return different, everything


def run(engine: OpenEngine, requests: Sequence[Request]) -> tuple[int, float, dict[str, list[int]]]:
    """Run the requests: tokens that the forward passes took in, seconds, and each request's tokens."""
    num_tokens = 0
    execute = engine.parts.executor.execute

    def counting(items: Sequence[ForwardItem]) -> object:
        nonlocal num_tokens
        num_tokens += sum(len(item.token_ids) for item in items)
        return execute(items)

    engine.parts.executor.execute = counting  # type: ignore[method-assign,assignment]  # a hook of this benchmark alone
    begin = time.perf_counter()
    outputs = run_all(engine, requests)
    seconds = time.perf_counter() - begin
    engine.parts.executor.execute = execute  # type: ignore[method-assign]  # the hook is taken out again
    return num_tokens, seconds, {name: tokens_of(output) for name, output in outputs.items()}


def measure(path: Path, trial: int) -> dict[str, dict[str, float]]:
    """Work and time of each way, each in an engine of its own so that none finds another's KV."""
    different, everything = make_requests(random.Random(trial))
    ways = {
        "140 different, alone": ("on", different),
        "200, computed once": ("on", everything),
        "200, engine.deduplicate=off": ("off", everything),
    }
    found: dict[str, dict[str, float]] = {}
    answers: list[dict[str, list[int]]] = []
    for name, (switch, requests) in ways.items():
        engine = load_engine(path, {"engine.deduplicate": switch, "engine.max_num_seqs": 16})
        num_tokens, seconds, tokens = run(engine, requests)
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table. Returns 0 if the work was done once, to 1 %, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.duplicates", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=3, metavar="N", help="workloads to average over")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every trial's figures there")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint(Path(folder) / "tiny", "qwen3", initializer_range=0.6)
        trials = [measure(path, trial) for trial in range(options.trials)]
    print(__doc__)
    print("| requests | forward tokens | work | time |")
    print("|---|---|---|---|")
    for name in trials[0]:
        mean = {key: statistics.mean(trial[name][key] for trial in trials) for key in trials[0][name]}
        print(f"| {name} | {mean['tokens']:.0f} | {mean['work']:.3f} | {mean['time']:.2f} |")
    if options.json is not None:
        options.json.write_text(json.dumps(trials, indent=1))
    return 0 if all(trial["200, computed once"]["work"] <= 1.01 for trial in trials) else 1


if __name__ == "__main__":
    sys.exit(main())
