"""Finds the operations for a device, and its native kernels, which engine/models/placement.py chooses between.

Nothing falls back in silence.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import NamedTuple, cast

import torch

from kernels import cpu, deterministic, int8
from kernels.interface import CompiledAhead, KernelsUnavailable, Operations, StepShape
from kernels.native.library import VARIANTS, available
from kernels.native.operations import NativeOperations
from kernels.quantised import WeightScheme

OLDEST_CAPABILITY = (8, 0)  # Ampere: asynchronous copies and bfloat16; the kernels are compiled for 8.0 and 9.0
FLOAT8_CAPABILITY = (8, 9)  # Ada: converts e4m3, and Triton compiles the conversion for no older one
NATIVE_OFF = "off"  # in place of a variant: PyTorch alone
LIBRARY_CALLS = {"linear": "cuBLAS through PyTorch, of quantised weights a kernel: nothing to fuse or to gather"}


def operations(device: torch.device) -> Operations:
    """The implementation for tensors of `device`: `kernels.cpu` on a CPU, `kernels.triton` on an NVIDIA GPU.

    On a CPU an engine mostly has native ones instead: `choose_native`, and `choose_operations` of its placement.py.
    Raises KernelsUnavailable for a device without one.
    """
    if device.type == "cpu":
        return cpu
    if device.type != "cuda":
        raise KernelsUnavailable(str(device), "millrace runs on CPUs and NVIDIA GPUs; accepted: cpu, cuda")
    _check_gpu(device)
    try:
        # Imported here: triton is neither needed nor, outside Linux, installable where there is no GPU.
        return cast("Operations", importlib.import_module("kernels.triton"))
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise KernelsUnavailable(str(device), "triton is not installed") from error


def deterministic_operations(device: torch.device) -> Operations:
    """The implementation whose results depend, bit for bit, on a row's own values alone.

    Raises KernelsUnavailable for a device without one.
    """
    if device.type != "cpu":
        raise KernelsUnavailable(str(device), "there are deterministic kernels for CPUs alone; accepted: cpu")
    return deterministic


def int8_operations(device: torch.device) -> Operations:
    """The implementation with weights of 8 bits.

    Raises KernelsUnavailable for a device without one, or a CPU without AVX-512 VNNI: there oneDNN adds pairs of 8-bit
    products in 16 bits, which saturate, or has only a path of a thousandth of the speed.
    """
    if device.type != "cpu":
        raise KernelsUnavailable(str(device), "there are 8-bit kernels for CPUs alone; accepted: cpu")
    if not torch.cpu._is_vnni_supported():
        raise KernelsUnavailable(
            str(device), "8-bit kernels need a CPU with AVX-512 VNNI; accepted: weights unquantised"
        )
    return int8


class NativeChoice(NamedTuple):
    """Whether a device's operations are native, and why."""

    variant: str  # of kernels.native.library, or NATIVE_OFF
    reason: str


def choose_native(device: torch.device) -> NativeChoice:
    """The fastest variant of the native kernels that was measured to be faster than PyTorch and runs here."""
    if device.type != "cpu":
        return NativeChoice(NATIVE_OFF, "the tensors are not on a CPU")
    try:
        variant = next((name for name in available() if name in VARIANTS), None)
    except KernelsUnavailable as error:
        return NativeChoice(NATIVE_OFF, error.reason)
    if variant is None:
        return NativeChoice(NATIVE_OFF, "they were measured on CPUs with AVX2 or later, which this is not")
    return NativeChoice(variant, "the fastest that this CPU runs")


def launch_class_of(ops: Operations, shape: StepShape) -> Callable[[int], Hashable] | None:
    """A function of a step's number of tokens: equal results launch the same compiled kernels.

    None for an implementation that compiles nothing at first use.
    """
    if getattr(ops, "__name__", "") != "kernels.triton":
        return None
    return partial(importlib.import_module("kernels.triton.compilation").launch_class, shape=shape)


def compile_ahead_of(ops: Operations) -> Callable[[Callable[[], None], int], CompiledAhead] | None:
    """A function that compiles what a run launches, in as many processes as it is told.

    None for an implementation that compiles nothing at first use.
    """
    if getattr(ops, "__name__", "") != "kernels.triton":
        return None
    compilation = importlib.import_module("kernels.triton.compilation")
    return cast("Callable[[Callable[[], None], int], CompiledAhead]", compilation.compile_ahead)


def blas_library_of(ops: Operations) -> str | None:
    """PyTorch's name of the library that was measured to multiply faster on this GPU; None: nothing was measured."""
    if getattr(ops, "__name__", "") != "kernels.triton":
        return None
    return cast("str | None", importlib.import_module("kernels.triton.launch").tuned("blas_library"))


def check_scheme(device: torch.device, scheme: WeightScheme) -> None:
    """Raise KernelsUnavailable where the device's kernels do not multiply weights that are rounded so."""
    if device.type == "cuda":
        importlib.import_module("kernels.triton.packed_quantised").check_scheme(scheme)


def check_float8_cache(device: torch.device) -> None:
    """Raise KernelsUnavailable where the device's kernels do not store keys and values in float8 e4m3."""
    if device.type != "cuda":
        raise KernelsUnavailable(str(device), "a KV cache in float8 is for GPUs; accepted: cuda")
    capability = torch.cuda.get_device_capability(device)
    if capability < FLOAT8_CAPABILITY:
        found = ".".join(str(part) for part in capability)
        raise KernelsUnavailable(
            str(device), f"compute capability {found} does not convert e4m3; accepted: from 8.9 on"
        )


def has_operations(device: torch.device) -> bool:
    """Whether this build has an implementation for the device."""
    try:
        operations(device)
    except KernelsUnavailable:
        return False
    return True


def operation_names() -> tuple[str, ...]:
    """Names of all operations, in the order of the interface."""
    return tuple(name for name, member in vars(Operations).items() if callable(member) and name[0] != "_")


def implementation_names(ops: Operations, device: torch.device) -> Mapping[str, str]:
    """Operation -> the implementation it has in `ops`, chosen for `device`, and why; for `millrace doctor`.

    Named after the package that defines the function: an implementation may take some operations from another.
    """
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        version = importlib.metadata.version("triton")
        reason = f"the tensors are on an NVIDIA GPU of compute capability {major}.{minor}"
    else:
        version = f"PyTorch {torch.__version__}"
        reason = "the tensors are on a CPU"
    names = {}
    for name in operation_names():
        package = getattr(ops, name).__module__.split(".")[1]  # kernels.<package>.<file>
        own = f"{package} ({version}): {reason}"
        names[name] = LIBRARY_CALLS.get(name, own) if package == "triton" else own
        if package == "native":
            native = cast("NativeOperations", ops)
            names[name] = native.library_calls.get(name, f"native ({native.variant}): {reason}")
    return names


def _check_gpu(device: torch.device) -> None:
    if not torch.cuda.is_available():
        raise KernelsUnavailable(str(device), "torch sees no CUDA device; accepted: cpu")
    if torch.version.hip is not None:
        raise KernelsUnavailable(str(device), "the kernels are tuned for NVIDIA GPUs, not AMD's; accepted: cpu")
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        found = ".".join(str(part) for part in capability)
        raise KernelsUnavailable(str(device), f"compute capability {found}; accepted: 8.0 and later, or cpu")
    current = torch.cuda.current_device()
    if device.index not in (None, current):
        raise KernelsUnavailable(str(device), f"kernels launch on the current device; accepted: cuda:{current}")
