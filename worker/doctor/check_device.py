"""torch and triton, the GPU and its driver, and whether a kernel runs."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import torch

from engine.loading.derived_settings import default_device
from engine.models.placement import choose_operations
from kernels import reference
from kernels.dispatch import implementation_names, operations
from kernels.interface import KernelsUnavailable, Operations
from settings import EngineSettings
from worker.cli.install_hint import INSTALL_ENGINE
from worker.doctor.finding import Finding
from worker.doctor.level import Level

DRIVER = Path("/proc/driver/nvidia/version")
_PYPI = "https://pypi.org/simple"  # whose torch for Linux has CUDA


def wanted_device(settings: EngineSettings) -> torch.device:
    """Where these settings put the model."""
    return torch.device(default_device() if settings.device == "auto" else settings.device)


def device_findings(settings: EngineSettings, device: torch.device) -> Iterator[Finding]:
    """Libraries, device, each operation's implementation, one kernel run, a GPU that is left alone."""
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
    by_implementation: dict[str, list[str]] = {}
    for operation, implementation in names.items():
        by_implementation.setdefault(implementation, []).append(operation)
    for implementation, its_operations in by_implementation.items():
        yield Finding("kernels", Level.OK, f"{implementation}: {', '.join(its_operations)}")
    yield kernel_run(ops, device)


def kernel_run(ops: Operations, device: torch.device) -> Finding:
    """One small kernel, compiled and run on the device, against the reference on the CPU."""
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
