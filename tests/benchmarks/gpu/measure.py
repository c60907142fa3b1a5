"""Measures a loaded engine: its memory, a whole workload, and decode steps by batch size.

The decode steps of all batch sizes follow one prefill. torch.profiler counts what host and GPU do in a step.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from engine.engine import Engine
from engine.model_status import MemoryProfile
from tests.benchmarks.gpu.workload import Deadline, GpuSizes, GpuWorkload, Limits, decode_workload

NUM_TIMES = 3

STEP = "engine step"
HOST_CALLS = ("cuda_runtime", "cuda_driver")  # categories of the trace
# Both interfaces' names: cudaLaunchKernel, cudaLaunchKernelExC, cuLaunchKernelEx (Triton); one graph is one launch.
LAUNCHES = re.compile(r"cu(da)?(Launch\w*Kernel\w*|GraphLaunch\w*|Memcpy\w+Async\w*|MemcpyAsync\w*|Memset\w*Async\w*)")
GRAPH_LAUNCHES = re.compile(r"cu(da)?GraphLaunch\w*")
# A plain cudaMemcpy waits as well.
SYNCS = re.compile(r"cu(da)?(Stream|Event|Device|Ctx)Synchronize\w*|cudaMemcpy|cuMemcpy(DtoH|HtoD)_v2")
ALLOCATIONS = re.compile(r"cu(da)?(Malloc|HostAlloc|MemAlloc|MemHostAlloc|MemCreate)\w*")
COPY_TO_HOST = "Memcpy DtoH"
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
NUM_KERNELS, KERNEL_NAME_CHARS = 16, 80  # that a figure names; templates' names are endless


@dataclass(frozen=True)
class Throughput:
    """The time and the counts of one run of a workload."""

    seconds: float
    output_tokens: int
    num_steps: int
    num_preemptions: int
    cached_tokens: int  # of the prompts, found in the prefix cache
    limit_s: float
    counts: StepCounts | None = None  # of its steps, where they were counted in another run of it

    @property
    def percent(self) -> float:
        """Speed in percent of what memory and arithmetic allow."""
        return 100 * self.limit_s / self.seconds

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second, prefill included."""
        return self.output_tokens / self.seconds


def run_workload(engine: Engine, load: GpuWorkload, limits: Limits, deadline: Deadline) -> Throughput:
    """Run and time a workload. Raises the error of a request that failed, and OutOfTime."""
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


def count_workload(engine: Engine, load: GpuWorkload, deadline: Deadline) -> StepCounts | None:
    """Count what the steps of a workload do that prefills alone, and run it to its end. None without a GPU."""
    for request in load.requests("counted "):
        engine.add_request(request)
    num_tokens = sum(map(len, load.prompts))
    num_steps = -(-num_tokens // engine.settings.engine.max_num_batched_tokens)
    counts = count_steps(engine.step, num_steps, torch.device(engine.settings.engine.device))
    while engine.has_unfinished():
        deadline.check()
        engine.step()
    return counts


class DecodeCells:
    """Measures decode by batch size: prefills the largest batch, then aborts requests down to each smaller one."""

    def __init__(self, engine: Engine, limits: Limits, sizes: GpuSizes, deadline: Deadline) -> None:
        self._engine = engine
        self._limits = limits
        self._sizes = sizes
        self._deadline = deadline
        self._device = torch.device(engine.settings.engine.device)
        self._lost_tokens = engine.stats().generated_tokens  # generated for requests that are no longer here

    def measure(self) -> Iterator[DecodeCell]:
        """Yield each batch size as it is done. Raises OutOfTime, and RuntimeError if the KV pool is too small."""
        batches = [batch for batch in self._sizes.batches if self._fits(batch)]
        if batches:
            yield from self._measure(batches)
        if len(batches) < len(self._sizes.batches):
            num_blocks = self._engine.stats().num_blocks
            left_out = ", ".join(str(batch) for batch in self._sizes.batches if batch not in batches)
            raise RuntimeError(f"batch {left_out}: too large for a KV pool of {num_blocks} blocks, or for max_num_seqs")

    def _measure(self, batches: Sequence[int]) -> Iterator[DecodeCell]:
        requests = decode_workload(self._sizes, batches[0]).requests("decode ")
        for request in requests:
            self._engine.add_request(request)
        self._prefill(batches[0])
        for batch in batches:
            for request in requests[batch:]:
                self._engine.abort(request.request_id)
            requests = requests[:batch]
            yield self._cell(batch)
        for request in requests:
            self._engine.abort(request.request_id)
        self._engine.step()

    def _fits(self, batch: int) -> bool:
        settings = self._engine.settings.engine
        load = decode_workload(self._sizes, 1)
        blocks = -(-(load.longest + batch) // settings.kv_cache.block_size)
        return batch <= settings.max_num_seqs and batch * blocks <= self._engine.stats().num_free_blocks

    def _prefill(self, batch: int) -> None:
        """Step until every sequence gets a token in every step."""
        grown = 0
        while grown != batch:
            before = self._engine.stats().generated_tokens
            self._step()
            grown = self._engine.stats().generated_tokens - before

    def _cell(self, batch: int) -> DecodeCell:
        for _ in range(self._sizes.warm_steps):
            self._step()
        first = self._mean_context(batch)
        before = (self._allocations(), self._replays())
        step_ms = tuple(self._timed() for _ in range(NUM_TIMES))
        after = (self._allocations(), self._replays())
        context = (first + self._mean_context(batch)) / 2
        num_steps = NUM_TIMES * self._sizes.timed_steps
        allocations, replays = (_mean(*pair, num_steps) for pair in zip(before, after, strict=True))
        counts = count_steps(self._step, self._sizes.profiled_steps, self._device)
        limit_s = self._limits.decode_step_s(batch, batch * context)
        return DecodeCell(batch, context, step_ms, limit_s * 1e3, allocations, replays, counts)

    def _timed(self) -> float:
        """Milliseconds a step, including the GPU's work of the last one."""
        self._synchronize()
        begin = time.perf_counter()
        for _ in range(self._sizes.timed_steps):
            self._step()
        self._synchronize()
        return (time.perf_counter() - begin) / self._sizes.timed_steps * 1e3

    def _step(self) -> None:
        """Run a step. It also returns what was aborted, whose tokens no longer count."""
        self._deadline.check()
        for output in self._engine.step():
            if output.error is not None:
                raise output.error
            if not output.was_aborted:
                raise RuntimeError(f"request {output.request_id} ended while it was measured")
            self._lost_tokens += len(output.completions[0].token_ids)

    def _mean_context(self, batch: int) -> float:
        generated = self._engine.stats().generated_tokens - self._lost_tokens
        return self._sizes.decode_prompt_tokens + generated / batch

    def _allocations(self) -> int | None:
        if self._device.type != "cuda":
            return None
        return int(torch.cuda.memory_stats(self._device)["allocation.all.allocated"])

    def _replays(self) -> int | None:
        graphs = self._engine.model_interface.status().decode_graphs
        return None if graphs is None else graphs.num_replays

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _mean(before: int | None, after: int | None, num_steps: int) -> float | None:
    return None if before is None or after is None else (after - before) / num_steps


@dataclass(frozen=True)
class StepCounts:
    """What host and GPU did in a step, on average."""

    kernels: float  # that the GPU ran, those of graphs included
    launches: float  # calls of the host that enqueue something: kernels, graphs, copies
    graph_launches: float
    syncs: float  # calls in which the host waits
    copies_to_host: float
    driver_allocations: float  # cudaMalloc, cudaHostAlloc and their like
    idle_percent: float  # of the time of these steps in which the GPU did nothing; the profiler makes the host slower
    kernel_us: dict[str, float]  # a step, by the kernel's name: those that take most

    @classmethod
    def of_trace(cls, events: Sequence[dict[str, Any]]) -> StepCounts | None:
        """From a Chrome trace of steps that are ranges named STEP; None where it holds no event of a GPU.

        Calls of the host count from the beginning of the first step to the end of the last: ending a profile
        synchronises by itself.
        """
        steps = [event for event in events if event.get("cat") == "user_annotation" and event.get("name") == STEP]
        calls = [event for event in events if event.get("cat") in HOST_CALLS]
        if not steps or not calls:
            return None
        begin, end = min(step["ts"] for step in steps), max(step["ts"] + step["dur"] for step in steps)
        names = Counter(call["name"] for call in calls if begin <= call["ts"] <= end)

        def mean(pattern: re.Pattern[str]) -> float:
            return sum(count for name, count in names.items() if pattern.fullmatch(name)) / len(steps)

        kernels = sum(event.get("cat") == "kernel" for event in events)
        copies = [event["name"] for event in events if event.get("cat") == "gpu_memcpy"]
        return cls(
            kernels=kernels / len(steps),
            launches=mean(LAUNCHES),
            graph_launches=mean(GRAPH_LAUNCHES),
            syncs=mean(SYNCS),
            copies_to_host=sum(name.startswith(COPY_TO_HOST) for name in copies) / len(steps),
            driver_allocations=mean(ALLOCATIONS),
            idle_percent=_idle_percent([event for event in events if event.get("cat") in DEVICE_WORK], begin, end),
            kernel_us=_kernel_us(events, len(steps)),
        )


def _kernel_us(events: Sequence[dict[str, Any]], num_steps: int) -> dict[str, float]:
    total_us: Counter[str] = Counter()
    for event in events:
        if event.get("cat") in DEVICE_WORK:
            total_us[event["name"][:KERNEL_NAME_CHARS]] += event["dur"]
    return {name: round(us / num_steps, 1) for name, us in total_us.most_common(NUM_KERNELS)}


def _idle_percent(work: Sequence[dict[str, Any]], begin: float, end: float) -> float:
    """The share of the time from `begin`, to `end` or the end of the last work, that no work covers."""
    busy, until = 0.0, begin
    for first, last in sorted((event["ts"], event["ts"] + event["dur"]) for event in work):
        busy += max(last - max(first, until), 0.0)
        until = max(until, last)
    return 100 * (1 - busy / (max(until, end) - begin))


@dataclass(frozen=True)
class DecodeCell:
    """The figures of decode at one batch size."""

    batch: int
    context_tokens: float  # mean over the sequences and the timed steps
    step_ms: tuple[float, ...]  # a step's mean of each time taken
    limit_ms: float
    allocations: float | None  # of the caching allocator, a step; None without a GPU
    replays: float | None  # of graphs, a step; None where steps are not captured
    counts: StepCounts | None  # None without a GPU

    @property
    def median_ms(self) -> float:
        """Median of the times that were taken, in ms a step."""
        return median(self.step_ms)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second."""
        return self.batch / self.median_ms * 1e3

    @property
    def percent(self) -> float:
        """Speed in percent of what memory and arithmetic allow."""
        return 100 * self.limit_ms / self.median_ms


def count_steps(step: Callable[[], object], num_steps: int, device: torch.device) -> StepCounts | None:
    """Count what steps do, by the profiler. None if it saw no GPU."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize(device)
    with profile(
        activities=activities, acc_events=True
    ) as profiler:  # else torch 2.11 warns of cycles, of which there is one
        for _ in range(num_steps):
            with record_function(STEP):
                step()
    with tempfile.TemporaryDirectory(prefix="millrace-gpu-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return StepCounts.of_trace(json.loads(path.read_bytes())["traceEvents"])


@dataclass(frozen=True)
class EngineLoad:
    """How long loading took, and where memory went: random weights, KV pool, graphs."""

    seconds: float
    weights_bytes: int
    kv_bytes: int
    num_blocks: int  # of the KV pool
    captured_graphs: int
    failed_graphs: int  # batch sizes whose capture failed: their steps run eagerly or in a larger graph
    memory: MemoryProfile | None  # where a GPU's went at start; None on a CPU

    @classmethod
    def of(cls, engine: Engine, seconds: float) -> EngineLoad:
        """Read the figures of an engine that took `seconds` to load."""
        status = engine.model_interface.status()
        graphs = status.decode_graphs
        return cls(
            seconds=seconds,
            weights_bytes=status.weights_bytes,
            kv_bytes=status.kv_bytes,
            num_blocks=status.num_blocks,
            captured_graphs=0 if graphs is None else len(graphs.captured_sizes),
            failed_graphs=0 if graphs is None else len(graphs.failed_sizes),
            memory=status.memory_profile,
        )

    def __str__(self) -> str:
        return (
            f"{self.seconds:.1f} s; weights {self.weights_bytes / 1e9:.2f} GB, KV {self.kv_bytes / 1e9:.2f} GB in "
            f"{self.num_blocks:,} blocks, {self.captured_graphs} graphs captured, {self.failed_graphs} not"
        )
