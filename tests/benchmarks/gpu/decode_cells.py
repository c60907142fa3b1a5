"""Decode steps at batch sizes, one prefill for all of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from engine.engine import Engine
from tests.benchmarks.gpu.deadline import Deadline
from tests.benchmarks.gpu.decode_cell import DecodeCell
from tests.benchmarks.gpu.gpu_sizes import GpuSizes
from tests.benchmarks.gpu.gpu_workload import decode_workload
from tests.benchmarks.gpu.limits import Limits
from tests.benchmarks.gpu.step_counts import count_steps

NUM_TIMES = 3


class DecodeCells:
    """Prefills the largest batch and measures it, aborts down to the next, and so on."""

    def __init__(self, engine: Engine, limits: Limits, sizes: GpuSizes, deadline: Deadline) -> None:
        self._engine = engine
        self._limits = limits
        self._sizes = sizes
        self._deadline = deadline
        self._device = torch.device(engine.settings.engine.device)
        self._lost_tokens = engine.stats().generated_tokens  # generated for requests that are no longer here

    def measure(self) -> Iterator[DecodeCell]:
        """Each batch size as it is done. Raises OutOfTime, at the end RuntimeError where the KV pool was too small."""
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
        """Milliseconds a step, the last one's work on the GPU included."""
        self._synchronize()
        begin = time.perf_counter()
        for _ in range(self._sizes.timed_steps):
            self._step()
        self._synchronize()
        return (time.perf_counter() - begin) / self._sizes.timed_steps * 1e3

    def _step(self) -> None:
        """What is aborted is handed out here: what had been generated for it counts no more."""
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
        graphs = self._engine.runner.status().decode_graphs
        return None if graphs is None else graphs.num_replays

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _mean(before: int | None, after: int | None, num_steps: int) -> float | None:
    return None if before is None or after is None else (after - before) / num_steps
