from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.errors import CapabilityError
from engine.loading.derived_settings import usable_cores
from settings import EngineSettings
from worker.doctor import machine as check_machine
from worker.doctor.machine import machine_findings
from worker.doctor.report import Finding, Level


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
