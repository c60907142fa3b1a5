"""A workload from the first request to the last output."""

from __future__ import annotations

import time
from dataclasses import dataclass

from engine.engine import Engine
from tests.benchmarks.gpu.deadline import Deadline
from tests.benchmarks.gpu.gpu_workload import GpuWorkload
from tests.benchmarks.gpu.limits import Limits


@dataclass(frozen=True)
class Throughput:
    """What one run of a workload took."""

    seconds: float
    output_tokens: int
    num_steps: int
    num_preemptions: int
    cached_tokens: int  # of the prompts, found in the prefix cache
    limit_s: float

    @property
    def percent(self) -> float:
        """Of what memory and arithmetic allow."""
        return 100 * self.limit_s / self.seconds

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second, prefill included."""
        return self.output_tokens / self.seconds


def run_workload(engine: Engine, load: GpuWorkload, limits: Limits, deadline: Deadline) -> Throughput:
    """Time it. Raises the error of a request that failed, OutOfTime."""
    requests = load.requests()
    before = engine.stats()
    begin = time.perf_counter()
    for request in requests:
        engine.add_request(request)
    counts: dict[str, int] = {}
    while engine.has_unfinished():
        deadline.check()
        for output in engine.step():
            if output.error is not None:
                raise output.error
            counts[output.request_id] = len(output.completions[0].token_ids)
    seconds = time.perf_counter() - begin
    found = tuple(counts.get(request.request_id, 0) for request in requests)
    if found != load.max_tokens:
        raise RuntimeError(f"{sum(found)} tokens were generated, {load.output_tokens} were asked for")
    after = engine.stats()
    return Throughput(
        seconds=seconds,
        output_tokens=load.output_tokens,
        num_steps=after.num_steps - before.num_steps,
        num_preemptions=after.num_preemptions - before.num_preemptions,
        cached_tokens=after.cached_tokens - before.cached_tokens,
        limit_s=limits.workload_s(load),
    )
