"""Which implementation of the operations a device gets: one per device, and never another in silence."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kernels import cpu
from kernels.errors import KernelsUnavailable
from kernels.interface import Operations


def operations(device: torch.device) -> Operations:
    """The implementation for tensors of `device`.

    Raises KernelsUnavailable for a device without one.
    """
    if device.type == "cpu":
        return cpu
    if device.type == "cuda":
        raise KernelsUnavailable(str(device), "the Triton implementations are not in this build; accepted: cpu")
    raise KernelsUnavailable(str(device), "millrace runs on CPUs and NVIDIA GPUs; accepted: cpu")


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
    return dict.fromkeys(operation_names(), f"cpu (PyTorch {torch.__version__}): the tensors are on a CPU")
