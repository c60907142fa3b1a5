"""What `millrace doctor` says of the machine: its device, its memory, its software."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch

from engine.errors import CapabilityError
from engine.loading.derived_settings import usable_cores
from kernels import cpu
from kernels.dispatch import operation_names
from settings import EngineSettings
from tests.support.redis_servers import configured, found_at
from worker.doctor import machine as check_device
from worker.doctor import machine as check_machine
from worker.doctor.machine import device_findings, driver_version, kernel_run, machine_findings, wanted_device
from worker.doctor.report import Finding, Level

CPU = torch.device("cpu")


def found(**engine: object) -> dict[str, Finding]:
    settings = EngineSettings.model_validate({"device": "cpu", **engine})
    return {finding.check: finding for finding in machine_findings(settings, torch.device("cpu"))}


def test_the_machine_is_told_with_what_the_engine_uses_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: A Processor @ 2.5GHz\n")
    monkeypatch.setattr(check_machine, "CPU_INFO", tmp_path / "cpuinfo")

    findings = found()

    assert findings["cpu"].detail.startswith(f"A Processor @ 2.5GHz, {torch.backends.cpu.get_cpu_capability()}; ")
    assert f"{usable_cores()} for tensor operations" in findings["threads"].detail
    assert " GiB free of " in findings["memory"].detail
    assert {finding.level for finding in findings.values()} == {Level.OK}


@pytest.mark.parametrize(("has_bfloat16", "level"), [(True, Level.OK), (False, Level.WARNING)])
def test_bfloat16_that_the_cpu_emulates_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, has_bfloat16: bool, level: Level
) -> None:
    monkeypatch.setattr(check_machine, "computes_bfloat16", lambda: has_bfloat16)

    assert found(dtype="bfloat16")["cpu"].level is level
    assert found(dtype="auto")["cpu"].level is Level.OK


def test_more_threads_than_cores_are_a_warning() -> None:
    finding = found(num_threads=usable_cores() + 1)["threads"]

    assert finding.level is Level.WARNING
    assert finding.fix == "set engine.num_threads=none"


def test_a_containers_limit_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_machine, "cgroup_headroom_bytes", lambda root: 2**30)

    assert found()["memory"].detail.endswith(", within the container's limit")


def test_memory_that_cannot_be_read_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable() -> int:
        raise CapabilityError("/proc/meminfo has no MemAvailable: set engine.kv_cache.num_blocks")

    monkeypatch.setattr(check_machine, "free_memory_bytes", unreadable)

    assert found()["memory"].level is Level.WARNING


@pytest.mark.parametrize(("maxmemory", "level"), [("0", Level.WARNING), ("100mb", Level.FAILED)])
def test_an_evicting_redis_is_as_bad_as_its_memory_is_bounded(redis_url: str, maxmemory: str, level: Level) -> None:
    with configured(redis_url, maxmemory=maxmemory, maxmemory_policy="allkeys-lru"):
        finding = found_at(redis_url)["redis eviction"]

    assert finding.level is level
    assert "CONFIG SET maxmemory-policy noeviction" in str(finding.fix)


@pytest.mark.parametrize(("share", "level"), [(0.5, Level.OK), (0.87, Level.WARNING), (0.98, Level.FAILED)])
def test_memory_that_runs_out_is_said_before_it_has(redis_url: str, share: float, level: Level) -> None:
    with configured(redis_url, maxmemory="0") as client:
        client.set("filling", "x" * (20 << 20))  # so that what this test itself takes is little
        used = int(client.info("memory")["used_memory"])
        client.config_set("maxmemory", int(used / share))
        finding = found_at(redis_url)["redis memory"]

    assert finding.level is level, finding
    assert ("limits.max_open_bytes" in str(finding.fix)) is (level is not Level.OK)


def test_a_limit_beyond_what_the_machine_has_is_no_limit(redis_url: str) -> None:
    with configured(redis_url, maxmemory="100000gb"):
        finding = found_at(redis_url)["redis memory"]

    assert finding.level is Level.WARNING
    assert "the kernel will end Redis first" in finding.detail


def test_without_a_limit_the_machines_memory_counts(redis_url: str) -> None:
    finding = found_at(redis_url)["redis memory"]

    assert finding.level is Level.OK
    assert "maxmemory is not set" in finding.detail


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A GPU of compute capability 9.0, as far as torch says; nothing can be computed on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**36, 2**37))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    return monkeypatch


def findings(device: str, **engine: object) -> dict[str, list[Finding]]:
    settings = EngineSettings.model_validate({"device": device, **engine})
    found: dict[str, list[Finding]] = {}
    for finding in device_findings(settings, wanted_device(settings)):
        found.setdefault(finding.check, []).append(finding)
    return found


def test_the_device_is_told_with_its_capability_and_driver(gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\nGCC 13.2\n"
    )
    gpu.setattr(check_device, "DRIVER", tmp_path / "version")

    (finding,) = findings("auto")["device"]

    assert finding.level is Level.OK
    assert finding.detail.startswith("H200, compute capability 9.0, driver 550.54.15, 64.0 of 128.0 GiB free")


def test_a_driver_that_does_not_tell_its_version_is_unknown(tmp_path: Path) -> None:
    assert driver_version(tmp_path / "nothing") == "unknown"


def test_each_operation_is_listed_once_with_its_implementation_on_a_gpu(gpu: pytest.MonkeyPatch) -> None:
    found = findings("auto")
    triton, library = sorted((finding.detail for finding in found["kernels"]), reverse=True)
    assert triton.startswith("triton (")
    assert "compute capability 9.0: " in triton
    assert "rms_norm, " in triton
    assert library.startswith("cuBLAS ")
    assert library.endswith(": linear")
    assert "gpu" not in found


def test_a_gpu_that_is_too_old_is_left_alone_with_the_reason(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    found = findings("auto")
    assert found["device"][0].detail.startswith("cpu")
    assert found["gpu"][0].level is Level.WARNING
    assert "compute capability 7.0; accepted: 8.0 and later" in found["gpu"][0].detail


def test_a_gpu_that_the_settings_leave_alone_is_a_warning(gpu: pytest.MonkeyPatch) -> None:
    (finding,) = findings("cpu")["gpu"]
    assert (finding.level, finding.detail) == (Level.WARNING, "not used: engine.device=cpu")


def test_a_driver_that_torch_cannot_use_is_a_warning_with_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15\n")
    monkeypatch.setattr(check_device, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)

    (finding,) = findings("auto")["gpu"]

    assert finding.level is Level.WARNING
    assert finding.detail == "not used: driver 550.54.15, but torch is a build for CPUs"
    assert f"torch=={torch.__version__.partition('+')[0]};" in str(finding.fix)


def test_each_operation_is_listed_with_what_the_settings_choose_for_it() -> None:
    details = [finding.detail for finding in findings("cpu", deterministic=True)["kernels"]]
    listed = {detail.partition(" ")[0]: detail.rpartition(": ")[2].split(", ") for detail in details}
    assert set(listed) == {"deterministic", "cpu"}
    assert "linear" in listed["deterministic"]
    assert "rms_norm" in listed["cpu"]
    assert sorted(listed["deterministic"] + listed["cpu"]) == sorted(operation_names())


def test_deterministic_kernels_on_a_gpu_fail(gpu: pytest.MonkeyPatch) -> None:
    (finding,) = findings("cuda", deterministic=True)["kernels"]
    assert finding.level is Level.FAILED
    assert "deterministic kernels for CPUs alone" in finding.detail


def test_cuda_without_a_gpu_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = findings("cuda")
    assert found["device"][0].level is found["kernels"][0].level is Level.FAILED


def test_a_kernel_is_run_on_the_cpu() -> None:
    (finding,) = findings("cpu")["kernel run"]
    assert finding.level is Level.OK


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_kernel_is_compiled_and_run_on_the_gpu() -> None:
    (finding,) = findings("cuda")["kernel run"]
    assert finding.level is Level.OK


def test_a_gpu_on_which_nothing_runs_fails(gpu: pytest.MonkeyPatch) -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch may have a GPU to run it on")
    (finding,) = findings("cuda")["kernel run"]
    assert finding.level is Level.FAILED
    assert finding.detail.startswith("silu_and_mul on cuda: ")


def test_a_kernel_that_answers_wrong_fails() -> None:
    wrong = types.ModuleType("wrong")
    vars(wrong).update(vars(cpu), silu_and_mul=lambda gate_up: gate_up[..., :64] * 2)

    finding = kernel_run(wrong, CPU)

    assert finding.level is Level.FAILED
    assert "is off by up to" in finding.detail
