from __future__ import annotations

from typing import Any

import torch

from tests.benchmarks.gpu.step_counts import STEP, StepCounts, count_steps


def event(category: str, name: str, at: float, lasts: float = 1.0) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": at, "dur": lasts}


STEPS = [event("user_annotation", STEP, 10.0, 8.0), event("user_annotation", STEP, 20.0, 8.0)]
TWO_STEPS = [
    *STEPS,
    event("gpu_user_annotation", STEP, 12.0, 30.0),
    event("cuda_runtime", "cudaGraphLaunch", 11.0),
    event("cuda_runtime", "cudaGraphLaunch", 21.0),
    event("cuda_driver", "cuLaunchKernelEx", 12.0),
    event("cuda_runtime", "cudaLaunchKernelExC", 22.0),
    event("cuda_runtime", "cudaMemcpyAsync", 13.0),
    event("cuda_runtime", "cudaEventSynchronize", 14.0),
    event("cuda_runtime", "cudaStreamSynchronize", 24.0),
    event("cuda_runtime", "cudaEventRecord", 24.5),
    event("cuda_runtime", "cudaStreamIsCapturing", 24.6),
    event("cuda_runtime", "cudaHostAlloc", 25.0),
    event("cuda_runtime", "cudaDeviceSynchronize", 30.0),  # the profiler's own
    *(event("kernel", f"kernel {number}", 15.0 + number) for number in range(6)),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 23.0),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 23.0),
]


def test_what_happens_in_the_steps_is_counted_and_what_the_profiler_does_after_them_is_not() -> None:
    assert StepCounts.of_trace(TWO_STEPS) == StepCounts(
        kernels=3.0, launches=2.5, graph_launches=1.0, syncs=1.0, copies_to_host=0.5, driver_allocations=0.5
    )


def test_a_trace_without_a_gpu_counts_nothing_rather_than_zero() -> None:
    assert StepCounts.of_trace([*STEPS, event("cpu_op", "aten::mm", 11.0)]) is None
    assert StepCounts.of_trace([]) is None
    calls: list[int] = []
    assert count_steps(lambda: calls.append(1), 3, torch.device("cpu")) is None
    assert len(calls) == 3
