"""Measures prefix hits and fair shares through the queue.

`python -m tests.benchmarks.prefix_order [--seeds N] [--json FILE]`

Real Redis, one real worker, a tiny model. Takes a minute.

Prefix hits: 8 jobs of 250 prompts under 40 prefixes of 128 to 512 tokens (8 roots, 5 branches each), shuffled, cut into
shards of 64; 16 sequences at a time, 128 in the engine; a KV pool of a third of the sum of the prefixes.

    hits    = cached prompt tokens / prompt tokens, as the jobs' usage says
    optimum = the same if every block of the prefix tree were computed once (see hit_rate)

First come: the same prompts in the order they were submitted, all at once, in the same scheduler without a model.

Fair shares: three tenants of 100, 100 and 10,000 prompts, the last of them submitted first and already running.

    in prompts = prompts of all tenants done from a small one's submission to its last record / (3 x its prompts)
    in seconds = that time / (3 x the same, alone on the worker)
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from engine.kv_cache.block_manager import BlockManager
from engine.scheduling.waiting_queue import SchedulerLimits
from tests.benchmarks.hit_rate import BLOCK_SIZE, FirstCome, Prompt, hits_percent, optimum_percent
from tests.support.engines import DryEngine
from tests.support.redis_servers import free_port, private_redis
from tests.support.tiny_checkpoint import make_checkpoint
from tests.support.workers import running_workers
from worker.client import BatchClient
from worker.schemas import JobStatus

NUM_JOBS, PROMPTS_A_JOB = 8, 250
NUM_ROOTS, NUM_BRANCHES = 8, 5
SHARD_SIZE = 64
LIMITS = SchedulerLimits(max_num_seqs=16, max_num_batched_tokens=2048, unified_prefill=True)
VOCAB_SIZE = 300
OUTPUT_TOKENS = 4
GOAL_PERCENT = 95.0

SMALL, NUM_SMALL, TIMES_LARGER = ("one", "two"), 100, 100
FAIR_OUTPUT_TOKENS = 32
FAIR_GOAL = 1.2
TIMEOUT_S = 120.0
POLL_S = 0.05


def make_prompts(rng: random.Random) -> tuple[list[Prompt], int]:
    """All jobs' prompts, shuffled, and the KV blocks of a third of the sum of the prefixes."""
    prefixes: list[Prompt] = []
    for _ in range(NUM_ROOTS):
        root = _tokens(rng, 64, 256)
        prefixes += [(*root, *_tokens(rng, 64, 256)) for _ in range(NUM_BRANCHES)]
    prompts = [(*rng.choice(prefixes), *_tokens(rng, 16, 48)) for _ in range(NUM_JOBS * PROMPTS_A_JOB)]
    return prompts, sum(map(len, prefixes)) // 3 // BLOCK_SIZE


def _tokens(rng: random.Random, least: int, most: int) -> Prompt:
    return tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(least, most)))


def measure_hits(model: Path, seed: int) -> dict[str, float]:
    """Hits in percent of the prompt tokens, by name of the order."""
    rng = random.Random(seed)
    prompts, num_blocks = make_prompts(rng)
    options = [f"worker.shard_size={SHARD_SIZE}", f"engine.kv_cache.num_blocks={num_blocks}"]
    options += [f"engine.max_num_seqs={LIMITS.max_num_seqs}"]
    with _worker(model, options) as client:
        job_ids = [client.submit(_lines(prompts[job::NUM_JOBS], OUTPUT_TOKENS)) for job in range(NUM_JOBS)]
        jobs = [_finished(client, job_id) for job_id in job_ids]
    first_come = DryEngine(BlockManager(num_blocks, BLOCK_SIZE, prefix_caching=True), LIMITS)
    first_come.scheduler._waiting = FirstCome()
    return {
        "by prefix, through the queue": 100
        * sum(job.usage.cached_tokens for job in jobs)
        / sum(job.usage.input_tokens for job in jobs),
        "first come": hits_percent(first_come, prompts, len(prompts), rng),
        "optimum of the prefix tree": optimum_percent(prompts),
    }


def measure_shares(model: Path, seed: int) -> dict[str, dict[str, float]]:
    """The ratios of each small tenant, in prompts and in seconds."""
    rng = random.Random(seed)

    def lines(count: int) -> Iterator[bytes]:
        prefixes = [_tokens(rng, 64, 64) for _ in range(-(-count // 20))]
        return _lines([(*rng.choice(prefixes), *_tokens(rng, 16, 48)) for _ in range(count)], FAIR_OUTPUT_TOKENS)

    with _worker(model, [f"engine.max_num_seqs={LIMITS.max_num_seqs}"]) as client:
        _run_time_s(client, client.submit(lines(NUM_SMALL)))  # warm
        alone_s = {name: _run_time_s(client, client.submit(lines(NUM_SMALL), tenant=name)) for name in SMALL}
        large = client.submit(lines(TIMES_LARGER * NUM_SMALL), tenant="large")
        while client.status(large).request_counts.finished < NUM_SMALL:
            time.sleep(POLL_S)
        small = {name: client.submit(lines(NUM_SMALL), tenant=name) for name in SMALL}
        num_done = _num_done_at_the_end_of(client, small, large)
        client.cancel(large)
        return {
            name: {
                "in prompts": num_done[name] / (3 * NUM_SMALL),
                "in seconds": _run_time_s(client, small[name]) / (3 * alone_s[name]),
            }
            for name in SMALL
        }


def _num_done_at_the_end_of(client: BatchClient, small: Mapping[str, str], large: str) -> dict[str, int]:
    """By small tenant: prompts of all tenants that were done between now and the end of its job."""
    before = client.status(large).request_counts.finished
    found: dict[str, int] = {}
    while len(found) < len(small):
        time.sleep(POLL_S)
        jobs = {name: client.status(job_id) for name, job_id in small.items()}
        num_done = sum(job.request_counts.finished for job in jobs.values())
        num_done += client.status(large).request_counts.finished - before
        found |= {name: num_done for name, job in jobs.items() if job.status.is_terminal and name not in found}
    return found


def _run_time_s(client: BatchClient, job_id: str) -> float:
    job = _finished(client, job_id)
    return (job.finished_at or 0.0) - job.created_at


def _finished(client: BatchClient, job_id: str) -> JobStatus:
    job = client.wait(job_id, TIMEOUT_S)
    if job.request_counts.failed:
        raise AssertionError(f"{job.request_counts.failed} prompts of {job_id} failed")
    return job


def _lines(prompts: Sequence[Prompt], output_tokens: int) -> Iterator[bytes]:
    body = {"max_tokens": output_tokens, "temperature": 0, "ignore_eos": True}
    return (json.dumps({"prompt": prompt, **body}).encode() for prompt in prompts)


@contextmanager
def _worker(model: Path, settings: Sequence[str]) -> Iterator[BatchClient]:
    options = [word for setting in settings for word in ("--set", setting)]
    with (
        tempfile.TemporaryDirectory() as folder,
        private_redis(Path(folder), port=free_port()) as url,
        running_workers(url, model, 1, *options),
        BatchClient(url) as client,
    ):
        yield client


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables. Returns 0 if both goals are reached, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.prefix_order",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="workloads to average over")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every workload's figures there")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(Path(folder) / "tiny", "qwen3")
        hits = [measure_hits(model, seed) for seed in range(options.seeds)]
        shares = [measure_shares(model, seed) for seed in range(options.seeds)]
    print(__doc__)
    print("| order | hits | of the optimum |\n|---|---|---|")
    for name in hits[0]:
        of_optimum = [100 * run[name] / run["optimum of the prefix tree"] for run in hits]
        print(f"| {name} | {statistics.mean(run[name] for run in hits):.1f} % | {statistics.mean(of_optimum):.1f} % |")
    print("\n| small tenant | in prompts: median, lowest, highest | in seconds |\n|---|---|---|")
    for name in SMALL:
        print(f"| {name} | {_spread(shares, name, 'in prompts')} | {_spread(shares, name, 'in seconds')} |")
    if options.json is not None:
        options.json.write_text(json.dumps({"hits": hits, "shares": shares}, indent=1) + "\n")
    worst_hits = min(100 * run["by prefix, through the queue"] / run["optimum of the prefix tree"] for run in hits)
    worst_share = statistics.median(max(run[name]["in prompts"] for name in SMALL) for run in shares)
    print(f"\nworst workload {worst_hits:.1f} % of the optimum, goal {GOAL_PERCENT:.0f} %")
    print(f"slower small tenant, in prompts: {worst_share:.2f} (median), goal at most {FAIR_GOAL}")
    return 0 if worst_hits >= GOAL_PERCENT and worst_share <= FAIR_GOAL else 1


def _spread(shares: Sequence[Mapping[str, Mapping[str, float]]], name: str, unit: str) -> str:
    ratios = sorted(run[name][unit] for run in shares)
    return f"{statistics.median(ratios):.2f}, {ratios[0]:.2f}, {ratios[-1]:.2f}"


if __name__ == "__main__":
    sys.exit(main())
