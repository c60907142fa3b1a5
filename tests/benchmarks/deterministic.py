"""Measures what `engine.deterministic` costs on this machine: `python -m tests.benchmarks.deterministic [--trials N]`.

Random checkpoints of 8 layers, one thread, trials of the two engines in turn. Seconds are the process's processor time,
so that what else runs on the machine does not count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.engine import Engine
from engine.request import Request
from tests.support.engines import greedy_request, load_engine, run_all
from tests.support.tiny_checkpoint import make_checkpoint
from tests.support.tiny_families import Family

SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
    "initializer_range": 0.02,
}
MODELS: Mapping[str, tuple[Family, dict[str, Any]]] = {
    "dense": ("qwen3", SHAPE),
    "moe": ("qwen3_moe", SHAPE | {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 352}),
}


@dataclass(frozen=True)
class Workload:
    """Requests of one length that start together."""

    name: str
    num_requests: int
    prompt_tokens: int
    max_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens read and written."""
        return self.num_requests * (self.prompt_tokens + self.max_tokens)

    def requests(self, trial: str) -> list[Request]:
        """The requests of one trial; their tokens are the same in every trial."""
        return [
            greedy_request(f"{trial}-{number}", [(7 * number + token) % 300 for token in range(self.prompt_tokens)],
                           self.max_tokens)
            for number in range(self.num_requests)
        ]  # fmt: skip


WORKLOADS = (
    Workload("prefill-heavy", num_requests=2, prompt_tokens=200, max_tokens=1),
    Workload("decode-heavy", num_requests=16, prompt_tokens=8, max_tokens=10),
    Workload("decode, one request", num_requests=1, prompt_tokens=8, max_tokens=12),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table. Returns 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.deterministic", description=__doc__)
    parser.add_argument("--trials", type=int, default=3, metavar="N", help="trials of each engine (3 or more)")
    trials = parser.parse_args(arguments).trials
    if trials < 3:
        parser.error("--trials: accepted: 3 or more")
    print("| model | dtype | workload | tokens/s | deterministic | times slower (best to worst trial) |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for model, (family, shape) in MODELS.items():
            path = make_checkpoint(Path(folder) / model, family, **shape)
            for dtype in ("float32", "bfloat16"):
                engines = [_load(path, dtype, deterministic=is_on) for is_on in (False, True)]
                for workload in WORKLOADS:
                    print(f"| {model} | {dtype} | {workload.name} | {measure(engines, workload, trials)} |", flush=True)
                for engine in engines:
                    engine.close()
    return 0


def measure(engines: Sequence[Engine], workload: Workload, trials: int) -> str:
    """One row's figures: medians of `trials`, after one run of each engine that warms up."""
    for engine in engines:
        run_all(engine, workload.requests("warm"))
    seconds = [[_seconds(engine, workload, trial) for engine in engines] for trial in range(trials)]
    normal, deterministic = (statistics.median(column) for column in zip(*seconds, strict=True))
    ratios = sorted(slow / fast for fast, slow in seconds)
    return (
        f"{workload.num_tokens / normal:.0f} | {workload.num_tokens / deterministic:.0f} | "
        f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )


def _seconds(engine: Engine, workload: Workload, trial: int) -> float:
    requests = workload.requests(str(trial))
    start = time.process_time()
    run_all(engine, requests)
    return time.process_time() - start


def _load(path: Path, dtype: str, *, deterministic: bool) -> Engine:
    return load_engine(
        path,
        {
            "engine.dtype": dtype,
            "engine.deterministic": str(deterministic).lower(),
            "engine.prefix_cache.enabled": "off",
            "engine.seed": "0",
        },
    )


if __name__ == "__main__":
    sys.exit(main())
