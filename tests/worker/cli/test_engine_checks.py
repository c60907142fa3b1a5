from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.dispatch import operation_names
from settings import load_settings
from worker.cli.engine_checks import engine_findings
from worker.cli.finding import Finding
from worker.cli.level import Level


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A GPU of compute capability 9.0, as far as torch says."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**36, 2**37))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    return monkeypatch


def findings(device: str, **engine: str) -> dict[str, list[Finding]]:
    overrides = {"engine.device": device} | {f"engine.{name}": value for name, value in engine.items()}
    effective = load_settings(overrides, environ={}, dotenv_path=None)
    found: dict[str, list[Finding]] = {}
    for finding in engine_findings(effective):
        found.setdefault(finding.check, []).append(finding)
    return found


def test_each_operation_is_listed_once_with_its_implementation_on_a_gpu(gpu: pytest.MonkeyPatch) -> None:
    found = findings("auto")
    triton, library = sorted((finding.detail for finding in found["kernels"]), reverse=True)
    assert triton.startswith("triton (")
    assert "compute capability 9.0: " in triton
    assert "rms_norm, " in triton
    assert library.startswith("cuBLASLt")
    assert library.endswith(": linear")
    assert "gpu" not in found


def test_on_a_gpu_the_pool_is_estimated_and_says_so(gpu: pytest.MonkeyPatch, checkpoint: Path) -> None:
    effective = load_settings({"model.path": str(checkpoint), "engine.device": "cuda"}, environ={}, dotenv_path=None)
    (detail,) = (finding.detail for finding in engine_findings(effective) if finding.check == "kv cache")
    assert detail.endswith("estimated: a worker measures what engine.gpu_memory_utilization=0.9 leaves")


def test_a_gpu_that_is_too_old_is_left_alone_with_the_reason(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    found = findings("auto")
    assert found["device"][0].detail.startswith("cpu")
    assert found["gpu"][0].level is Level.WARNING
    assert "compute capability 7.0; accepted: 8.0 and later" in found["gpu"][0].detail


def test_a_gpu_that_the_settings_leave_alone_is_a_warning(gpu: pytest.MonkeyPatch) -> None:
    (finding,) = findings("cpu")["gpu"]
    assert (finding.level, finding.detail) == (Level.WARNING, "not used: engine.device=cpu")


def test_each_operation_is_listed_with_what_the_settings_choose_for_it() -> None:
    details = [finding.detail for finding in findings("cpu", deterministic="true")["kernels"]]
    listed = {detail.partition(" ")[0]: detail.rpartition(": ")[2].split(", ") for detail in details}
    assert set(listed) == {"deterministic", "cpu"}
    assert "linear" in listed["deterministic"]
    assert "rms_norm" in listed["cpu"]
    assert sorted(listed["deterministic"] + listed["cpu"]) == sorted(operation_names())


def test_deterministic_kernels_on_a_gpu_fail(gpu: pytest.MonkeyPatch) -> None:
    (finding,) = findings("cuda", deterministic="true")["kernels"]
    assert finding.level is Level.FAILED
    assert "deterministic kernels for CPUs alone" in finding.detail


def test_cuda_without_a_gpu_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = findings("cuda")
    assert found["device"][0].level is found["kernels"][0].level is Level.FAILED
