"""Measures how long small tenants wait for a large one: `python -m tests.benchmarks.fairness [--wall] [--json FILE]`.

Three tenants of equal priority, one with 100 times the prompts of each of the others, all submitted at once, the large
one's first. A tenant's fair share is the time it would need alone with a third of the machine.

    ratio = time until its last prompt ends, beside the others / (3 x that time, alone on the machine)

The last prompt runs for up to 64 steps of 64 tokens beside the others, of a few tokens alone: 4096 tokens that no order
can save, 14 % of the fair time of 100 prompts. So tenants of 200 prompts and more are judged.

Time is tokens run (scheduler and account of KV blocks without a model: exact, the same on every machine); with --wall
also seconds of processor time on a tiny model, one thread, the large tenant cut off when the small ones have ended.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from engine.engine import Engine
from engine.kv_cache.block_manager import BlockManager
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduling.waiting_queue import SchedulerLimits
from tests.support.engines import DryEngine, load_engine
from tests.support.tiny_checkpoint import make_checkpoint

LIMITS = SchedulerLimits(max_num_seqs=64, max_num_batched_tokens=2048, unified_prefill=True)
NUM_BLOCKS, BLOCK_SIZE = 4096, 16
GOAL = 1.2
LARGE, SMALL = "large", ("small one", "small two")
TIMES_LARGER = 100
JUDGED_FROM = WALL_PROMPTS = 200  # prompts of a small tenant


class Workload:
    """Prompts of one tenant: groups of 20 under a prefix of their own."""

    def __init__(
        self, tenant: str, num_prompts: int, *, vocab_size: int, prefix_tokens: int, output_tokens: int
    ) -> None:
        rng = random.Random(tenant)
        prefixes = [[rng.randrange(vocab_size) for _ in range(prefix_tokens)] for _ in range(-(-num_prompts // 20))]
        self.tenant = tenant
        self.prompts = [
            [*prefixes[number // 20], *(rng.randrange(vocab_size) for _ in range(rng.randint(16, 64)))]
            for number in range(num_prompts)
        ]
        self.output_tokens = [rng.randint(output_tokens // 2, output_tokens) for _ in self.prompts]
        rng.shuffle(self.prompts)


def tokens_until_the_end(workloads: Sequence[Workload]) -> dict[str, int]:
    """Tokens run until the last prompt of each tenant but the large one has ended, by tenant."""
    engine = DryEngine(BlockManager(NUM_BLOCKS, BLOCK_SIZE, prefix_caching=True), LIMITS)
    left = {load.tenant: len(load.prompts) for load in workloads}
    for load in workloads:
        for number, (prompt, count) in enumerate(zip(load.prompts, load.output_tokens, strict=True)):
            engine.add(f"{load.tenant}/{number}", prompt, count, load.tenant)
    ended: dict[str, int] = {}
    while any(left[tenant] for tenant in left if tenant != LARGE):
        for state in engine.step():
            tenant = state.request.tenant
            left[tenant] -= 1
            if not left[tenant]:
                ended[tenant] = engine.scheduled_tokens
    return ended


def seconds_until_the_end(engine: Engine, workloads: Sequence[Workload], trial: str) -> dict[str, float]:
    """Processor time in s until the last prompt of each small tenant ended, by tenant; the rest is cut off."""
    tenants: dict[str, str] = {}
    for load in workloads:
        for number, (prompt, count) in enumerate(zip(load.prompts, load.output_tokens, strict=True)):
            request_id = f"{trial}/{load.tenant}/{number}"
            params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
            engine.add_request(Request(request_id, prompt, params, tenant=f"{trial}/{load.tenant}"))
            tenants[request_id] = load.tenant
    left = {load.tenant: len(load.prompts) for load in workloads}
    ended: dict[str, float] = {}
    begin = time.process_time()
    while any(left[tenant] for tenant in left if tenant != LARGE):
        for output in engine.step():
            tenant = tenants.pop(output.request_id)
            left[tenant] -= 1
            if not left[tenant]:
                ended[tenant] = time.process_time() - begin
    for request_id in tenants:
        engine.abort(request_id)
    engine.step()
    return ended


def virtual_ratios(num_small: int) -> dict[str, float]:
    """Ratio of each small tenant in tokens run."""
    sizes = {LARGE: TIMES_LARGER * num_small} | dict.fromkeys(SMALL, num_small)
    loads = {
        tenant: Workload(tenant, count, vocab_size=100_000, prefix_tokens=256, output_tokens=64)
        for tenant, count in sizes.items()
    }
    together = tokens_until_the_end(list(loads.values()))
    return {tenant: together[tenant] / (3 * tokens_until_the_end([loads[tenant]])[tenant]) for tenant in SMALL}


def wall_ratios(num_small: int, trials: int) -> dict[str, list[float]]:
    """Ratios of each small tenant in processor seconds, one a trial."""
    sizes = {LARGE: TIMES_LARGER * num_small} | dict.fromkeys(SMALL, num_small)
    loads = {
        tenant: Workload(tenant, count, vocab_size=300, prefix_tokens=64, output_tokens=32)
        for tenant, count in sizes.items()
    }
    found: dict[str, list[float]] = {tenant: [] for tenant in SMALL}
    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint(Path(folder) / "tiny", "qwen3")
        engine = load_engine(path, {"engine.kv_cache.num_blocks": NUM_BLOCKS})
        seconds_until_the_end(engine, [loads[SMALL[0]]], "warm")
        for trial in range(trials):
            alone = {t: seconds_until_the_end(engine, [loads[t]], f"alone {trial}")[t] for t in SMALL}
            together = seconds_until_the_end(engine, list(loads.values()), f"together {trial}")
            for tenant in SMALL:
                found[tenant].append(together[tenant] / (3 * alone[tenant]))
        engine.close()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table. Returns 0 if every small tenant reaches the goal in tokens, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.fairness", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--wall", action="store_true", help="also measure seconds on a tiny model (some minutes)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args(arguments)
    print(__doc__)
    print("| prompts of a small tenant | time | small one | small two |")
    print("|---|---|---|---|")
    figures: dict[str, dict[str, object]] = {}
    worst = 0.0
    for num_small in (50, 100, 200, 400):
        ratios = virtual_ratios(num_small)
        if num_small >= JUDGED_FROM:
            worst = max(worst, *ratios.values())
        figures[f"tokens, {num_small} prompts"] = dict(ratios)
        print(f"| {num_small} | tokens | " + " | ".join(f"{ratios[t]:.2f}" for t in SMALL) + " |", flush=True)
    if options.wall:
        seconds = wall_ratios(WALL_PROMPTS, trials=3)
        figures[f"seconds, {WALL_PROMPTS} prompts"] = dict(seconds)
        spread = (f"{sorted(seconds[t])[1]:.2f} ({min(seconds[t]):.2f} to {max(seconds[t]):.2f})" for t in SMALL)
        print(f"| {WALL_PROMPTS} | processor time, 3 trials | " + " | ".join(spread) + " |")
    print(f"\nworst in tokens, {JUDGED_FROM} prompts and more: {worst:.2f}, goal at most {GOAL}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1))
    return 0 if worst <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
