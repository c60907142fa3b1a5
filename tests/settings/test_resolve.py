"""Which source of a setting wins, and what is said of the settings in force.

Command line > environment > .env > profile > derived > default.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from settings import EffectiveSettings, Settings, SettingsError, Source, load_settings
from settings.resolve import value_of

pytestmark = pytest.mark.usefixtures("bare_environment")

KEY = "engine.max_num_seqs"
VARIABLE = "MILLRACE_ENGINE__MAX_NUM_SEQS"
STRENGTH = [Source.COMMAND_LINE, Source.ENVIRONMENT, Source.DOTENV, Source.PROFILE]
VALUES: Mapping[Source, int] = {
    Source.COMMAND_LINE: 11,
    Source.ENVIRONMENT: 12,
    Source.DOTENV: 13,
    Source.PROFILE: 14,
}


def load_from(sources: list[Source], directory: Path) -> EffectiveSettings:
    """Settings with KEY set in each of `sources` to that source's value."""
    overrides = {KEY: str(VALUES[Source.COMMAND_LINE])} if Source.COMMAND_LINE in sources else {}
    environ = {VARIABLE: str(VALUES[Source.ENVIRONMENT])} if Source.ENVIRONMENT in sources else {}
    if Source.DOTENV in sources:
        (directory / ".env").write_text(f"{VARIABLE}={VALUES[Source.DOTENV]}\n")
    if Source.PROFILE in sources:
        (directory / "p.toml").write_text(f"[engine]\nmax_num_seqs = {VALUES[Source.PROFILE]}\n")
        environ["MILLRACE_PROFILE"] = str(directory / "p.toml")
    return load_settings(overrides, environ=environ)


@pytest.mark.parametrize("strongest", range(len(STRENGTH)))
def test_the_strongest_source_that_sets_a_key_decides_it(strongest: int, tmp_path: Path) -> None:
    effective = load_from(STRENGTH[strongest:], tmp_path)

    assert effective.settings.engine.max_num_seqs == VALUES[STRENGTH[strongest]]
    assert effective.source_of(KEY) is STRENGTH[strongest]


@pytest.mark.parametrize("source", STRENGTH)
def test_a_derived_value_yields_to_every_source_that_a_person_wrote(source: Source, tmp_path: Path) -> None:
    effective = load_from([source], tmp_path).with_derived({KEY: 99})

    assert effective.settings.engine.max_num_seqs == VALUES[source]
    assert effective.source_of(KEY) is source


def test_a_derived_value_beats_the_default() -> None:
    effective = load_settings(environ={}).with_derived({KEY: 99})

    assert effective.settings.engine.max_num_seqs == 99
    assert effective.source_of(KEY) is Source.DERIVED


def test_without_any_source_everything_is_default() -> None:
    effective = load_settings(environ={})

    assert effective.settings.engine.max_num_seqs == 64
    assert {row.source for row in effective.rows()} == {Source.DEFAULT}


def test_sources_of_different_keys_mix() -> None:
    Path("p.toml").write_text("[engine.kv_cache]\nblock_size = 32\nnum_blocks = 9\n[log]\nlevel = 'error'\n")
    Path(".env").write_text("MILLRACE_ENGINE__KV_CACHE__NUM_BLOCKS=10\n")
    effective = load_settings({"log.level": "debug"}, environ={}, profile_path=Path("p.toml"))

    kv_cache = effective.settings.engine.kv_cache
    assert (kv_cache.block_size, kv_cache.num_blocks, effective.settings.log.level) == (32, 10, "debug")
    assert effective.source_of("engine.kv_cache.block_size") is Source.PROFILE
    assert effective.source_of("engine.kv_cache.num_blocks") is Source.DOTENV
    assert effective.source_of("log.level") is Source.COMMAND_LINE


def test_a_value_that_is_overridden_must_still_be_acceptable() -> None:
    Path(".env").write_text(f"{VARIABLE}=lots\n")

    with pytest.raises(SettingsError, match=r"^\.env:1: MILLRACE_ENGINE__MAX_NUM_SEQS=lots: accepted: "):
        load_settings({KEY: "3"}, environ={})


def test_the_environment_of_the_process_is_read_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "12")

    assert load_settings().settings.engine.max_num_seqs == 12


def test_a_given_environment_replaces_that_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "12")

    assert load_settings(environ={}).settings.engine.max_num_seqs == 64


def test_the_profile_of_an_argument_beats_that_of_the_variable() -> None:
    Path("a.toml").write_text("[engine]\nmax_num_seqs = 1\n")
    Path("b.toml").write_text("[engine]\nmax_num_seqs = 2\n")
    environ = {"MILLRACE_PROFILE": "b.toml"}

    assert load_settings(environ=environ).settings.engine.max_num_seqs == 2
    assert load_settings(environ=environ, profile_path=Path("a.toml")).settings.engine.max_num_seqs == 1


def test_dotenv_may_name_the_profile_and_the_environment_overrides_it() -> None:
    Path("a.toml").write_text("[engine]\nmax_num_seqs = 1\n")
    Path("b.toml").write_text("[engine]\nmax_num_seqs = 2\n")
    Path(".env").write_text("MILLRACE_PROFILE=a.toml\n")

    assert load_settings(environ={}).settings.engine.max_num_seqs == 1
    assert load_settings(environ={"MILLRACE_PROFILE": "b.toml"}).settings.engine.max_num_seqs == 2


def test_derived_values_fill_only_what_nobody_set() -> None:
    environ = {"MILLRACE_ENGINE__KV_CACHE__NUM_BLOCKS": "100"}
    before = load_settings(environ=environ)
    after = before.with_derived(
        {"engine.kv_cache.num_blocks": 500, "engine.num_threads": 8, "engine.device": "cpu", "model.name": "tiny"}
    )

    engine = after.settings.engine
    assert (engine.kv_cache.num_blocks, engine.num_threads, engine.device) == (100, 8, "cpu")
    assert after.source_of("engine.kv_cache.num_blocks") is Source.ENVIRONMENT
    assert after.source_of("engine.num_threads") is Source.DERIVED
    assert before.settings.engine.num_threads is None
    assert before.source_of("engine.num_threads") is Source.DEFAULT


def test_a_written_auto_or_none_leaves_the_decision_open() -> None:
    environ = {"MILLRACE_ENGINE__DEVICE": "auto", "MILLRACE_ENGINE__MAX_MODEL_LEN": "none"}
    effective = load_settings({"model.name": "auto"}, environ=environ).with_derived(
        {"engine.device": "cpu", "engine.max_model_len": 4096, "model.name": "other"}
    )

    assert effective.settings.engine.device == "cpu"
    assert effective.settings.engine.max_model_len == 4096
    assert effective.source_of("engine.device") is Source.DERIVED
    assert effective.settings.model.name == "auto"


def test_a_derived_value_is_typed_and_never_read_as_text() -> None:
    effective = load_settings(environ={}).with_derived({"model.name": "none"})

    assert effective.settings.model.name == "none"
    with pytest.raises(SettingsError, match=r"^engine\.num_threads=8: accepted: a whole number"):
        effective.with_derived({"engine.num_threads": "8"})


def test_what_was_derived_first_stays() -> None:
    effective = load_settings(environ={}).with_derived({"engine.num_threads": 8})

    assert effective.with_derived({"engine.num_threads": 4}).settings.engine.num_threads == 8


@pytest.mark.parametrize(("key", "value"), [("engine.num_threads", 0), ("engine.device", "tpu"), ("engine.threads", 4)])
def test_a_derived_value_is_checked_like_any_other(key: str, value: object) -> None:
    with pytest.raises(SettingsError, match=f"^{key}={value}: "):
        load_settings(environ={}).with_derived({key: value})


def test_nothing_can_be_changed_afterwards() -> None:
    effective = load_settings(environ={})

    with pytest.raises(ValidationError):
        effective.settings.engine.max_num_seqs = 3
    with pytest.raises(ValidationError):
        effective.settings.engine.kv_cache.block_size = 32
    with pytest.raises(ValidationError):
        effective.settings.log = effective.settings.log
    with pytest.raises(dataclasses.FrozenInstanceError):
        effective.settings = Settings()  # type: ignore[misc]  # that it is refused is the point


def test_settings_made_by_hand_read_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_LOG__LEVEL", "debug")
    Path(".env").write_text("MILLRACE_LOG__FORMAT=json\n")

    assert Settings() == load_settings(environ={}, dotenv_path=Path("/dev/null")).settings


def test_settings_made_by_hand_refuse_unknown_names_and_text_for_numbers() -> None:
    with pytest.raises(ValidationError):
        Settings.model_validate({"engine": {"max_num_seq": 3}})
    with pytest.raises(ValidationError):
        Settings.model_validate({"engine": {"max_num_seqs": "3"}})


def test_json_holds_each_value_that_the_settings_hold() -> None:
    effective = load_settings({"model.path": "/m", "engine.kv_cache.num_blocks": "7"}, environ={})
    printed = json.loads(json.dumps(effective.as_json()))

    assert printed["engine.kv_cache.num_blocks"] == {"value": 7, "source": "command line"}
    assert printed["engine.max_model_len"] == {"value": None, "source": "default"}
    for key, entry in printed.items():
        if key not in {"redis.url", "model.path"}:
            assert entry["value"] == value_of(effective.settings, key)
    assert printed["model.path"]["value"] == "/m"


def test_an_unknown_key_has_no_source() -> None:
    with pytest.raises(KeyError):
        load_settings(environ={}).source_of("engine.max_num_seq")


def as_environment(effective: EffectiveSettings) -> dict[str, str]:
    """What `millrace config` prints, as variables."""
    return {row.variable: row.value_text for row in effective.rows()}


def test_what_is_printed_can_be_set_again() -> None:
    effective = load_settings({"worker.lease_s": "12.5", "engine.trace_steps": "on"}, environ={})

    assert load_settings(environ=as_environment(effective)).settings == effective.settings


@given(
    seqs=st.integers(1, 2048),
    seed=st.none() | st.integers(0, 2**63 - 1),
    lease_s=st.floats(10, 86_400),
    enabled=st.booleans(),
    device=st.sampled_from(["auto", "cpu", "cuda"]),
    name=st.none() | st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=20).filter(str.isprintable),
)
def test_any_settings_survive_being_printed_and_set_again(
    seqs: int, seed: int | None, lease_s: float, enabled: bool, device: str, name: str | None
) -> None:
    typed = {
        "engine.max_num_seqs": seqs,
        "engine.seed": seed,
        "worker.lease_s": lease_s,
        "engine.prefix_cache.enabled": enabled,
        "engine.device": device,
        "model.name": None if name is not None and name.lower() == "none" else name,
    }
    effective = load_settings(typed, environ={})

    assert {key: value_of(effective.settings, key) for key in typed} == typed
    assert load_settings(environ=as_environment(effective)).settings == effective.settings
