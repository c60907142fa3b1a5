"""Which implementation of the operations a device gets: one per device, and never another in silence."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from typing import cast

import torch

from kernels import cpu, deterministic
from kernels.errors import KernelsUnavailable
from kernels.interface import Operations

OLDEST_CAPABILITY = (8, 0)  # Ampere: asynchronous copies and bfloat16; the kernels are compiled for 8.0 and 9.0
LIBRARY_CALLS = {"linear": "cuBLASLt through PyTorch: a dense product, nothing to fuse or to gather"}


def operations(device: torch.device) -> Operations:
    """The implementation for tensors of `device`: `kernels.cpu` on a CPU, `kernels.triton` on an NVIDIA GPU.

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


def implementation_names(device: torch.device) -> Mapping[str, str]:
    """Operation -> the implementation it uses on `device` and why, for `millrace doctor`.

    Raises KernelsUnavailable for a device without one.
    """
    operations(device)
    if device.type == "cpu":
        return dict.fromkeys(operation_names(), f"cpu (PyTorch {torch.__version__}): the tensors are on a CPU")
    major, minor = torch.cuda.get_device_capability(device)
    version = importlib.metadata.version("triton")
    ours = f"triton ({version}): the tensors are on an NVIDIA GPU of compute capability {major}.{minor}"
    return {name: LIBRARY_CALLS.get(name, ours) for name in operation_names()}


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
