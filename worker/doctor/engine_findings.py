"""What `millrace doctor` asks torch, the kernels, the machine and the model. Imported only where torch is installed."""

from __future__ import annotations

from collections.abc import Iterator

from settings import EffectiveSettings
from worker.doctor.check_device import device_findings, wanted_device
from worker.doctor.check_machine import machine_findings
from worker.doctor.check_model import model_findings
from worker.doctor.finding import Finding


def engine_findings(effective: EffectiveSettings) -> Iterator[Finding]:
    """Everything that a worker needs beside Redis."""
    settings = effective.settings.engine
    device = wanted_device(settings)
    yield from device_findings(settings, device)
    yield from machine_findings(settings, device)
    yield from model_findings(effective)
