from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kernels import cpu, reference
from kernels.dispatch import implementation_names, operation_names, operations
from kernels.errors import KernelsUnavailable
from kernels.interface import Operations

# mypy checks these two: a module with a missing or differently typed operation does not pass.
CPU: Operations = cpu
REFERENCE: Operations = reference


def test_the_cpu_gets_the_pytorch_implementation() -> None:
    assert operations(torch.device("cpu")) is cpu


@pytest.mark.parametrize(
    ("device", "reason"), [("cuda:1", "Triton implementations are not in this build"), ("mps", "")]
)
def test_a_device_without_kernels_is_refused(device: str, reason: str) -> None:
    with pytest.raises(KernelsUnavailable, match=f"{device}.*{reason}.*accepted: cpu"):
        operations(torch.device(device))
    with pytest.raises(KernelsUnavailable):
        implementation_names(torch.device(device))


def test_every_operation_of_the_interface_is_named_with_its_implementation() -> None:
    names = implementation_names(torch.device("cpu"))
    assert set(names) == set(operation_names()) == set(reference.__all__)
    assert set(cpu.__all__) == set(operation_names())
    assert all(name.startswith("cpu (PyTorch") for name in names.values())


def test_the_package_imports_nothing() -> None:
    code = "import sys, kernels; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
