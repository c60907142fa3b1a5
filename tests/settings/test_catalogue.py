"""Every setting explains itself, and no password is ever printed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import settings
from settings import RedisSettings, SettingRow, SettingsError, load_settings, parse_assignments
from settings.catalogue import Catalogue
from settings.fields import mask_url

pytestmark = pytest.mark.usefixtures("bare_environment")

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
        "request, is one. Not set, a GPU of 16 GiB and more has 256, of 100 GiB and more 512.",
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
        "ServeSettings",
    ]  # fmt: skip
    assert all(hasattr(settings, name) for name in settings.__all__)


def test_importing_settings_brings_no_tensor_library_and_no_queue() -> None:
    code = "import settings, sys; print(sorted({'torch', 'triton', 'redis', 'celery', 'engine'} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=settings.__path__[0] + "/.."
    )

    assert result.stdout == "[]\n"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("redis://:hunter2@h:6379/0", "redis://:***@h:6379/0"),
        ("rediss://user:hunter2@h/1", "rediss://user:***@h/1"),
        ("redis://user:hun@ter2@h", "redis://user:***@h"),
        ("redis://user:hun/ter2@h", "redis://user:***@h"),
        ("redis://hunter2@h/0", "redis://***@h/0"),
        ("unix://:hunter2@/run/redis.sock", "unix://:***@/run/redis.sock"),
        ("redis://h/0?password=hunter2&db=1", "redis://h/0?password=***&db=1"),
        ("redis://h/0?db=1&Password=hunter2", "redis://h/0?db=1&Password=***"),
        ("hunter2", "***"),
    ],
)
def test_a_url_is_shown_without_its_passwords(url: str, shown: str) -> None:
    assert mask_url(url) == shown


def test_no_output_holds_the_password() -> None:
    effective = load_settings(environ={"MILLRACE_REDIS__URL": "redis://me:hunter2@h:6379/0"})

    assert effective.settings.redis.url.get_secret_value() == "redis://me:hunter2@h:6379/0"
    assert effective.as_json()["redis.url"] == {"value": "redis://me:***@h:6379/0", "source": "environment"}
    everything = f"{effective!r} {effective.settings} {effective.rows()} {json.dumps(effective.as_json())}"
    assert "hunter2" not in everything


@pytest.mark.parametrize(
    "environ",
    [
        {"MILLRACE_REDIS__URL": "http://:hunter2@h"},
        {"MILLRACE_REDIS__URL": "redis://:hunter2"},
        {"MILLRACE_REDIS__URL": "redis//:hunter2@h"},
        {"MILLRACE_REDIS__URL": "hunter2://h"},
        {"MILLRACE_REDIS__URL": "redis://:hunter2@h/db"},
        {"MILLRACE_REDIS__URI": "redis://:hunter2"},
        {"MILLRACE_REDIS__PASSWORD": "hunter2"},
        {"MILLRACE_BROKER": "redis://:hunter2@h"},
        {"MILLRACE_LOG__LEVEL": "redis://:hunter2@h"},
    ],
)
def test_no_error_holds_the_password(environ: dict[str, str]) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(environ=environ)

    error = caught.value
    assert "***" in str(error)
    assert "hunter2" not in f"{error} {error!r} {error.value} {error.__cause__} {vars(error)}"


@pytest.mark.parametrize(
    "text", ["redis = {url = 'http://:hunter2@h'}", "[redis]\nurl = ['hunter2']", "pass = 'hunter2'"]
)
def test_no_error_about_a_profile_holds_the_password(text: str) -> None:
    Path("p.toml").write_text(text)
    with pytest.raises(SettingsError) as caught:
        load_settings(environ={}, profile_path=Path("p.toml"))

    assert "***" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_an_option_that_is_no_assignment_keeps_its_password() -> None:
    with pytest.raises(SettingsError) as caught:
        parse_assignments(["redis://:hunter2@h"])

    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "redis://h:6379/0",
        "rediss://u:p@h:1/2",
        "redis://[::1]:6379/0",
        "unix:///run/r.sock?db=1",
        "redis://:p@h?a=b",
    ],
)
def test_redis_urls_are_accepted(url: str) -> None:
    assert load_settings({"redis.url": url}, environ={}).settings.redis.url.get_secret_value() == url


@pytest.mark.parametrize(
    "url",
    ["", "h:6379", "http://h", "redis://", "redis://:6379", "redis://h:port", "redis://h:0", "redis://h:99999",
     "redis://h/one", "redis://h/0/1", "redis://${HOST}/0", "redis://a b/0", "unix://run", "redis://h/0#x", "redis://[::1"],
)  # fmt: skip
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(SettingsError, match="accepted: redis://"):
        load_settings({"redis.url": url}, environ={})


def test_a_group_made_by_hand_hides_its_url() -> None:
    assert "127.0.0.1" not in repr(RedisSettings())
