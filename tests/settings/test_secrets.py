"""No password is ever printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from settings import RedisSettings, SettingsError, load_settings, parse_assignments
from settings.masking import mask_url


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
