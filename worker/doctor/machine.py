"""Checks this machine: processors and memory, torch and triton, the GPU and its driver, and whether a kernel runs."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from engine.errors import CapabilityError
from engine.loading.derived_settings import computes_bfloat16, default_device, usable_cores
from engine.loading.kv_pool import CGROUP, cgroup_headroom_bytes, free_memory_bytes
from engine.models.placement import choose_operations, explain_native
from kernels import reference
from kernels.dispatch import NATIVE_OFF, implementation_names, operations
from kernels.interface import KernelsUnavailable, Operations
from settings import EngineSettings
from worker.doctor.report import INSTALL_ENGINE, Finding, Level

CPU_INFO = Path("/proc/cpuinfo")

DRIVER = Path("/proc/driver/nvidia/version")
_PYPI = "https://pypi.org/simple"  # whose torch for Linux has CUDA


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


def wanted_device(settings: EngineSettings) -> torch.device:
    """Where these settings put the model."""
    return torch.device(default_device() if settings.device == "auto" else settings.device)


def device_findings(settings: EngineSettings, device: torch.device) -> Iterator[Finding]:
    """Libraries, device, each operation's implementation, a run of one kernel, and a GPU that is not used."""
    yield Finding("torch", Level.OK, f"{torch.__version__}, CUDA {torch.version.cuda or 'none (a build for CPUs)'}")
    yield _triton()
    yield _device(settings, device)
    yield from _kernels(settings, device)
    yield from _unused_gpu(settings, device)


def _triton() -> Finding:
    try:
        return Finding("triton", Level.OK, importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        level = Level.FAILED if torch.cuda.is_available() else Level.OK
        fix = INSTALL_ENGINE if level is Level.FAILED else None
        return Finding("triton", level, "not installed (it is needed on CUDA only)", fix)


def _device(settings: EngineSettings, device: torch.device) -> Finding:
    asked = f"engine.device={settings.device}"
    if device.type == "cpu":
        return Finding("device", Level.OK, f"cpu ({asked})")
    if not torch.cuda.is_available():
        fix = "install the NVIDIA driver and a CUDA build of torch, or set engine.device=cpu"
        return Finding("device", Level.FAILED, f"{asked}, but torch sees no CUDA device", fix)
    free, total = torch.cuda.mem_get_info(device)
    major, minor = torch.cuda.get_device_capability(device)
    return Finding(
        "device",
        Level.OK,
        f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}, driver {driver_version(DRIVER)}, "
        f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free ({asked})",
    )


def driver_version(path: Path) -> str:
    """Of the NVIDIA kernel module, such as 550.54.15; `unknown` where there is none."""
    try:
        words = path.read_text().split()
    except OSError:
        return "unknown"
    numbers = (word for word in words if word.replace(".", "").isdecimal() and "." in word)
    return next(numbers, "unknown")


def _kernels(settings: EngineSettings, device: torch.device) -> Iterator[Finding]:
    try:
        ops = choose_operations(settings, device)
        names = implementation_names(ops, device)
    except KernelsUnavailable as error:
        yield Finding("kernels", Level.FAILED, str(error), "set engine.device=cpu, or leave the setting it names out")
        return
    yield _native(settings, device)
    by_implementation: dict[str, list[str]] = {}
    for operation, implementation in names.items():
        by_implementation.setdefault(implementation, []).append(operation)
    for implementation, its_operations in by_implementation.items():
        yield Finding("kernels", Level.OK, f"{implementation}: {', '.join(its_operations)}")
    yield kernel_run(ops, device)


def _native(settings: EngineSettings, device: torch.device) -> Finding:
    choice = explain_native(settings, device)
    detail = f"{choice.variant}: {choice.reason}"
    if choice.variant == NATIVE_OFF:
        return Finding("native kernels", Level.OK, f"{detail}; the operations run in PyTorch")
    return Finding("native kernels", Level.OK, f"{detail}; PyTorch alone: engine.native_kernels=off")


def kernel_run(ops: Operations, device: torch.device) -> Finding:
    """Whether one small kernel, compiled and run on the device, gives what the reference gives on the CPU."""
    gate_up = torch.linspace(-4, 4, 256).reshape(2, 128)
    expected = reference.silu_and_mul(gate_up)
    fix = "see the driver's and triton's versions above against torch's; else set engine.device=cpu"
    try:
        computed = ops.silu_and_mul(gate_up.to(device)).cpu()
    except Exception as error:  # whatever a compiler, a driver or a missing C compiler raises
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return Finding("kernel run", Level.FAILED, f"silu_and_mul on {device}: {reason[0]}", fix)
    if not torch.allclose(computed, expected, rtol=1e-4, atol=1e-5):
        worst = float((computed - expected).abs().max())
        return Finding("kernel run", Level.FAILED, f"silu_and_mul on {device} is off by up to {worst:.3g}", fix)
    return Finding("kernel run", Level.OK, f"silu_and_mul on {device} gives what the reference does")


def _unused_gpu(settings: EngineSettings, device: torch.device) -> Iterator[Finding]:
    if device.type != "cpu":
        return
    if not torch.cuda.is_available():
        if DRIVER.exists():
            why = "torch is a build for CPUs" if torch.version.cuda is None else "torch cannot use its driver"
            version = torch.__version__.partition("+")[0]
            fix = f"pip install --force-reinstall --index-url {_PYPI} torch=={version}; or a newer driver"
            yield Finding("gpu", Level.WARNING, f"not used: driver {driver_version(DRIVER)}, but {why}", fix)
        return
    try:
        operations(torch.device("cuda"))
    except KernelsUnavailable as error:
        yield Finding("gpu", Level.WARNING, f"not used: {error}", "run on a GPU the kernels support")
        return
    detail = f"not used: engine.device={settings.device}"
    yield Finding("gpu", Level.WARNING, detail, "set engine.device=auto to use it")
