"""Command line > environment > .env > profile > derived > default, for every one of the sources."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from settings import EffectiveSettings, SettingsError, Source, load_settings

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


def test_the_profile_named_by_an_argument_beats_the_one_named_by_the_variable() -> None:
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
