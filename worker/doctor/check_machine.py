"""The processors and the memory that an engine has here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from engine.errors import CapabilityError
from engine.loading.derived_settings import computes_bfloat16, usable_cores
from engine.loading.memory import CGROUP, cgroup_headroom_bytes, free_memory_bytes
from settings import EngineSettings
from worker.doctor.finding import Finding
from worker.doctor.level import Level

CPU_INFO = Path("/proc/cpuinfo")


def machine_findings(settings: EngineSettings, device: torch.device) -> Iterator[Finding]:
    """What the processor can do, threads against cores, memory against the container's limit."""
    if device.type == "cpu":
        yield _processor(settings)
    yield _threads(settings)
    try:
        free_bytes = free_memory_bytes()
    except CapabilityError as error:
        yield Finding("memory", Level.WARNING, str(error), "set engine.kv_cache.num_blocks")
    else:
        yield _memory(free_bytes)


def _processor(settings: EngineSettings) -> Finding:
    features = {
        "bfloat16 products": computes_bfloat16(),
        "AMX": torch.cpu._is_amx_tile_supported(),
        "8-bit products (VNNI)": torch.cpu._is_vnni_supported(),
    }
    used = ", ".join(f"{name}: {'yes' if has else 'no'}" for name, has in features.items())
    detail = f"{_cpu_name(CPU_INFO)}, {torch.backends.cpu.get_cpu_capability()}; {used}"
    if settings.dtype == "bfloat16" and not features["bfloat16 products"]:
        return Finding(
            "cpu",
            Level.WARNING,
            f"{detail}; engine.dtype=bfloat16 is emulated, at a fifth of float32's speed",
            "set engine.dtype=auto",
        )
    return Finding("cpu", Level.OK, detail)


def _threads(settings: EngineSettings) -> Finding:
    cores = usable_cores()
    num_threads = settings.num_threads or cores
    detail = f"{num_threads} for tensor operations, {cores} usable cores of {os.cpu_count()}"
    if num_threads > cores:
        return Finding("threads", Level.WARNING, f"{detail}: they wait for each other", "set engine.num_threads=none")
    return Finding("threads", Level.OK, detail)


def _memory(free_bytes: int) -> Finding:
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limited = "" if cgroup_headroom_bytes(CGROUP) is None else ", within the container's limit"
    return Finding("memory", Level.OK, f"{size_text(free_bytes)} free of {size_text(total_bytes)}{limited}")


def size_text(num_bytes: int) -> str:
    """Such as 1.50 GiB, or 3.2 MiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _cpu_name(path: Path) -> str:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return "unknown processor"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "unknown processor")
