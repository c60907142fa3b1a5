"""Every setting explains itself."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import settings
from settings import SettingRow, load_settings
from settings.catalogue import Catalogue

SPECS = list(Catalogue.read().specs.values())
UNITS_BY_SUFFIX = {"_s": "s", "_bytes": "bytes", "_tokens": "tokens", "_seqs": "sequences", "_blocks": "blocks"}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.key)
def test_every_setting_has_a_description_and_accepted_forms(spec: settings.catalogue.SettingSpec) -> None:
    assert re.fullmatch(r"\S.{10,}\.", spec.description)
    assert spec.accepted
    # A number without both ends would accept what no machine can hold.
    if spec.kind in {int, float}:
        assert re.search(r"\d+ to \d+|above 0, at most 1", spec.accepted)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.key)
def test_every_default_is_accepted_by_its_own_setting(spec: settings.catalogue.SettingSpec) -> None:
    assert spec.read(spec.default) == spec.default


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.key)
def test_a_number_named_after_its_unit_has_that_unit(spec: settings.catalogue.SettingSpec) -> None:
    for suffix, unit in UNITS_BY_SUFFIX.items():
        if spec.kind is not bool and spec.key.endswith(suffix):
            assert spec.unit == unit


def test_the_settings_the_project_promises_are_there() -> None:
    promised = {
        "model.path", "redis.url", "engine.device", "engine.dtype", "engine.max_num_seqs",
        "engine.max_num_batched_tokens", "engine.kv_cache.block_size", "engine.kv_cache.num_blocks",
        "engine.prefix_cache.enabled",
    }  # fmt: skip

    assert promised <= Catalogue.read().specs.keys()


def test_the_knobs_of_the_seed_are_mapped_to_settings_that_exist() -> None:
    documented = set(re.findall(r"\b(?:engine|model|worker|log|limits|redis)(?:\.[a-z_]+)+", settings.__doc__ or ""))
    groups = Catalogue.read().groups

    assert len(documented) >= 18
    assert documented - groups <= Catalogue.read().specs.keys()


def test_the_defaults_of_the_seed_that_are_kept() -> None:
    engine = settings.Settings().engine

    assert engine.max_num_batched_tokens == 2048
    assert engine.profile.every_steps == 16
    assert engine.kv_cache.block_size == 16
    assert (engine.profile.max_tokens, engine.profile.min_seqs) == (None, None)


def test_a_row_carries_all_that_a_table_needs() -> None:
    row = next(row for row in load_settings({"engine.max_num_seqs": "8"}, environ={}).rows() if row.value == 8)

    assert row == SettingRow(
        key="engine.max_num_seqs",
        variable="MILLRACE_ENGINE__MAX_NUM_SEQS",
        value=8,
        value_text="8",
        source=settings.Source.COMMAND_LINE,
        accepted="a whole number, 1 to 65536",
        unit="sequences",
        description="Most sequences that run at the same time: each of n completions, each input of an embedding "
        "request, is one.",
        default=64,
        default_text="64",
    )


def test_the_public_names_are_those_promised() -> None:
    assert settings.__all__ == [
        "Settings", "EffectiveSettings", "SettingRow", "Source", "SettingsError", "load_settings",
        "parse_assignments", "ModelSettings", "ToolCallFormat", "ReasoningFormat", "RedisSettings", "EngineSettings",
        "KVCacheSettings",
        "PrefixCacheSettings", "DecodeSettings", "MoeSettings", "CudaGraphSettings", "StructuredOutputSettings",
        "ProfileSettings", "WorkerSettings", "LimitSettings", "LogSettings", "MetricsSettings", "TracingSettings",
    ]  # fmt: skip
    assert all(hasattr(settings, name) for name in settings.__all__)


def test_importing_settings_brings_no_tensor_library_and_no_queue() -> None:
    code = "import settings, sys; print(sorted({'torch', 'triton', 'redis', 'celery', 'engine'} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=settings.__path__[0] + "/.."
    )

    assert result.stdout == "[]\n"
