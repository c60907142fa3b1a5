"""Admission follows the settings."""

from __future__ import annotations

from settings import LimitSettings
from worker.registry.intake import AdmissionLimits


def test_every_limit_comes_from_a_setting_and_unset_ones_are_left_out() -> None:
    limits = LimitSettings(max_open_prompts=70_000, max_open_bytes=2**30, max_open_jobs=9, max_tenant_jobs=3)
    assert list(AdmissionLimits.from_settings(limits).for_script()) == [
        {"scope": "all", "resource": "prompts", "most": 70_000},
        {"scope": "all", "resource": "bytes", "most": 2**30},
        {"scope": "all", "resource": "jobs", "most": 9},
        {"scope": "tenant", "resource": "jobs", "most": 3},
    ]
