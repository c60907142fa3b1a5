"""What the host and the GPU do in a step, counted by torch.profiler."""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

STEP = "engine step"
HOST_CALLS = ("cuda_runtime", "cuda_driver")  # categories of the trace
# Both interfaces' names: cudaLaunchKernel, cudaLaunchKernelExC, cuLaunchKernelEx (Triton); one graph is one launch.
LAUNCHES = re.compile(r"cu(da)?(Launch\w*Kernel\w*|GraphLaunch\w*|Memcpy\w+Async\w*|MemcpyAsync\w*|Memset\w*Async\w*)")
GRAPH_LAUNCHES = re.compile(r"cu(da)?GraphLaunch\w*")
# A plain cudaMemcpy waits as well.
SYNCS = re.compile(r"cu(da)?(Stream|Event|Device|Ctx)Synchronize\w*|cudaMemcpy|cuMemcpy(DtoH|HtoD)_v2")
ALLOCATIONS = re.compile(r"cu(da)?(Malloc|HostAlloc|MemAlloc|MemHostAlloc|MemCreate)\w*")
COPY_TO_HOST = "Memcpy DtoH"


@dataclass(frozen=True)
class StepCounts:
    """Means a step."""

    kernels: float  # that the GPU ran, those of graphs included
    launches: float  # calls of the host that enqueue something: kernels, graphs, copies
    graph_launches: float
    syncs: float  # calls in which the host waits
    copies_to_host: float
    driver_allocations: float  # cudaMalloc, cudaHostAlloc and their like

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
        )


def count_steps(step: Callable[[], object], num_steps: int, device: torch.device) -> StepCounts | None:
    """Run steps under the profiler. None where it saw no GPU."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize(device)
    with profile(activities=activities) as profiler:
        for _ in range(num_steps):
            with record_function(STEP):
                step()
    with tempfile.TemporaryDirectory(prefix="millrace-gpu-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return StepCounts.of_trace(json.loads(path.read_bytes())["traceEvents"])
