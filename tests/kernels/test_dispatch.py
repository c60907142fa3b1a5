"""Which implementation of the operations a device gets."""

from __future__ import annotations

import importlib.metadata
import inspect
import subprocess
import sys

import pytest
import torch

import kernels.triton
from kernels import cpu, deterministic, int8, reference
from kernels.dispatch import (
    LIBRARY_CALLS,
    deterministic_operations,
    has_operations,
    implementation_names,
    int8_operations,
    operation_names,
    operations,
)
from kernels.interface import KernelsUnavailable, Operations

# mypy checks these: a module with a missing or differently typed operation does not pass.
CPU: Operations = cpu
REFERENCE: Operations = reference
DETERMINISTIC: Operations = deterministic
INT8: Operations = int8
TRITON: Operations = kernels.triton

CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A GPU of compute capability 9.0, as far as torch says."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return monkeypatch


def test_the_cpu_gets_the_pytorch_implementation() -> None:
    assert operations(torch.device("cpu")) is cpu


def test_deterministic_operations_are_for_cpus_alone() -> None:
    assert deterministic_operations(torch.device("cpu")) is deterministic
    with pytest.raises(KernelsUnavailable, match=r"cuda.*deterministic kernels for CPUs alone; accepted: cpu"):
        deterministic_operations(CUDA)


def test_8_bit_operations_are_for_cpus_that_add_8_bit_products_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)
    assert int8_operations(torch.device("cpu")) is int8
    with pytest.raises(KernelsUnavailable, match=r"cuda.*8-bit kernels for CPUs alone; accepted: cpu"):
        int8_operations(CUDA)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    with pytest.raises(KernelsUnavailable, match=r"need a CPU with AVX-512 VNNI; accepted: weights unquantised"):
        int8_operations(torch.device("cpu"))


def test_an_nvidia_gpu_gets_the_triton_kernels(gpu: pytest.MonkeyPatch) -> None:
    assert operations(CUDA) is kernels.triton
    assert has_operations(CUDA)


def test_a_device_that_is_neither_is_refused() -> None:
    with pytest.raises(KernelsUnavailable, match=r"mps.*accepted: cpu, cuda"):
        operations(torch.device("mps"))


def test_cuda_is_refused_where_torch_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(KernelsUnavailable, match=r"cuda:0.*torch sees no CUDA device; accepted: cpu"):
        operations(CUDA)
    assert not has_operations(CUDA)


def test_a_gpu_older_than_the_kernels_is_refused(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(KernelsUnavailable, match=r"compute capability 7\.5; accepted: 8\.0 and later"):
        operations(CUDA)


def test_a_gpu_that_launches_would_not_go_to_is_refused(gpu: pytest.MonkeyPatch) -> None:
    with pytest.raises(KernelsUnavailable, match=r"cuda:1.*accepted: cuda:0"):
        operations(torch.device("cuda", 1))


def test_an_amd_gpu_is_refused(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.version, "hip", "7.0")
    with pytest.raises(KernelsUnavailable, match="not AMD's"):
        operations(CUDA)


def test_a_gpu_without_triton_is_refused(gpu: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("kernels.triton")]:
        gpu.delitem(sys.modules, name)
    gpu.setitem(sys.modules, "triton", None)  # importing it raises ModuleNotFoundError
    with pytest.raises(KernelsUnavailable, match="triton is not installed"):
        operations(CUDA)


def test_other_import_errors_are_not_hidden(gpu: pytest.MonkeyPatch) -> None:
    gpu.delitem(sys.modules, "kernels.triton")
    gpu.setitem(sys.modules, "kernels.triton.dense", None)
    with pytest.raises(ModuleNotFoundError):
        operations(CUDA)


def test_every_operation_of_the_interface_is_named_with_its_implementation(gpu: pytest.MonkeyPatch) -> None:
    for module in (cpu, deterministic, int8, reference, kernels.triton):
        offered = {name for name, member in vars(module).items() if inspect.isfunction(member)}
        assert offered == set(operation_names())
    on_cpu, on_gpu = implementation_names(cpu, torch.device("cpu")), implementation_names(kernels.triton, CUDA)
    assert set(on_cpu) == set(on_gpu) == set(operation_names())
    assert all(name.startswith("cpu (PyTorch") for name in on_cpu.values())
    assert set(LIBRARY_CALLS) == {"linear"}
    assert on_gpu["linear"].startswith("cuBLAS ")
    version = importlib.metadata.version("triton")
    expected = f"triton ({version}): the tensors are on an NVIDIA GPU of compute capability 9.0"
    assert {on_gpu[name] for name in on_gpu if name != "linear"} == {expected}


def test_an_operation_taken_from_another_package_is_named_after_that() -> None:
    names = implementation_names(deterministic, torch.device("cpu"))
    assert names["linear"] == f"deterministic (PyTorch {torch.__version__}): the tensors are on a CPU"
    assert names["rms_norm"] == implementation_names(cpu, torch.device("cpu"))["rms_norm"]


def test_the_package_imports_nothing() -> None:
    code = "import sys, kernels; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_dispatch_does_not_import_triton_for_a_cpu() -> None:
    code = (
        "import sys, torch, kernels.dispatch; kernels.dispatch.operations(torch.device('cpu'));"
        "sys.exit('kernels.triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
