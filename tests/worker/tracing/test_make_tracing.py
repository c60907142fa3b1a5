from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from settings import SettingsError, TracingSettings
from worker.schemas import SubmitOptions
from worker.tracing.spans import Tracing, make_tracing

JOB = "s0-01234567-89ab-7cde-8f01-23456789abcd"
ROOT = Path(__file__).resolve().parents[3]


def test_it_is_off_unless_it_is_asked_for() -> None:
    tracing = make_tracing(TracingSettings(), service="millrace-worker", instance="w")

    assert type(tracing) is Tracing
    with tracing.submit(JOB, SubmitOptions()) as traceparent:
        assert traceparent == ""


def test_without_the_packages_all_works_and_whoever_wants_spans_is_told_what_to_install() -> None:
    code = """
import sys
sys.modules["opentelemetry"] = None  # as if it were not installed
from settings import TracingSettings
from worker.async_client import AsyncBatchClient
from worker.client import BatchClient
from worker.runtime.runtime import WorkerRuntime
BatchClient("redis://127.0.0.1:1").close()
try:
    BatchClient("redis://127.0.0.1:1", tracing=TracingSettings(enabled=True))
except ValueError as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True)

    assert done.stdout.startswith("SettingsError tracing.enabled=true: opentelemetry")
    assert 'is not installed: pip install -e ".[tracing]"' in done.stdout


def test_a_defect_of_ours_is_not_taken_for_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "worker.tracing.open_telemetry", None)

    with pytest.raises(ModuleNotFoundError):
        make_tracing(TracingSettings(enabled=True), service="s", instance="i")


def test_the_error_names_setting_value_and_what_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("worker.tracing.open_telemetry", "worker.tracing.open_telemetry"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)

    with pytest.raises(SettingsError) as caught:
        make_tracing(TracingSettings(enabled=True), service="s", instance="i")

    assert (caught.value.name, caught.value.value) == ("tracing.enabled", "true")
    assert caught.value.accepted is not None
    assert "false" in caught.value.accepted
