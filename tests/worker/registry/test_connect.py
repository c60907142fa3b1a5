"""The way to Redis: addresses, passwords, and patience with a Redis that is away."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
import redis
import trustme
from pydantic import SecretStr
from redis import Redis
from redis.backoff import NoBackoff

from settings import RedisSettings, SettingsError
from tests.support.registry import TestRegistry
from worker.registry.connect import (
    MAX_PASSWORD_BYTES,
    AsyncPatientRetry,
    PatientRetry,
    RedisAddress,
    connect,
    is_refusal,
    read_password_line,
)

RETRIES = 3


def address(url: str, **options: object) -> RedisAddress:
    return RedisAddress.of(RedisSettings.model_validate({"url": SecretStr(url), **options}))


def refusal(url: str, **options: object) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        address(url, **options)
    assert "hunter2" not in f"{caught.value} {caught.value.__cause__}"
    return caught.value


@pytest.mark.parametrize(
    "url",
    ["redis://localhost", "redis://LOCALHOST:1/0", "redis://127.0.0.1", "redis://127.9.9.9", "redis://[::1]:6379/0",
     "rediss://localhost", "unix:///run/redis.sock"],
)  # fmt: skip
def test_a_redis_on_this_machine_needs_no_password(url: str) -> None:
    assert address(url).url == url


@pytest.mark.parametrize(
    "url",
    ["redis://redis:6379/0", "redis://10.0.0.1", "redis://0.0.0.0", "redis://localhost.example.com", "rediss://redis",
     "redis://127.0.0.1.example.com", "redis://[fe80::1]", "redis://user@redis", "redis://:@redis",
     "redis://redis/0?password=hunter2"],
)  # fmt: skip
def test_another_machines_redis_needs_one(url: str) -> None:
    error = refusal(url)
    assert error.name == "redis.url"
    assert error.problem == "on another machine and without a password"
    for way_out in ("redis://user:password@host", "redis.password_file", "unix://", "redis.allow_unauthenticated=true"):
        assert way_out in str(error.accepted)
    assert address(url, allow_unauthenticated=True).url == url


def test_a_redis_with_a_password_may_be_anywhere(tmp_path: Path) -> None:
    assert address("redis://:hunter2@redis").url == "redis://:hunter2@redis"
    assert "hunter2" not in repr(address("redis://:hunter2@redis"))


@pytest.mark.parametrize(
    ("url", "with_password"),
    [
        ("redis://worker@redis:1/2", "redis://worker:hunter2%2F%40%3A%23%3F%20x@redis:1/2"),
        ("rediss://redis", "rediss://:hunter2%2F%40%3A%23%3F%20x@redis"),
        ("unix://worker@/run/r.sock?db=1", "unix://worker:hunter2%2F%40%3A%23%3F%20x@/run/r.sock?db=1"),
    ],
)
def test_a_password_comes_from_a_file_whatever_characters_it_has(tmp_path: Path, url: str, with_password: str) -> None:
    file = tmp_path / "password"
    for end in ("", "\n", "\r\n"):
        file.write_bytes(f"hunter2/@:#? x{end}".encode())
        assert address(url, password_file=file).url == with_password
    with connect(RedisSettings(url=SecretStr(url), password_file=file)) as client:
        assert isinstance(client, Redis)
        assert client.connection_pool.connection_kwargs["password"] == "hunter2/@:#? x"


@pytest.mark.parametrize("data", [b"", b"\n", b"hunter2\nhunter2", b"hunter2\xff", b"hunter2" * 100, b"hunter2\0"])
def test_a_file_that_holds_no_password_is_refused_and_not_shown(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "password"
    file.write_bytes(data)
    error = refusal("redis://worker@redis", password_file=file)
    assert (error.name, error.value) == ("redis.password_file", str(file))
    assert "one line" in str(error.accepted)


def test_a_password_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "No such file" in refusal("redis://worker@redis", password_file=tmp_path / "none").problem


def test_two_passwords_are_one_too_many(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("hunter2")
    assert refusal("redis://:hunter2@redis", password_file=tmp_path / "password").accepted == "one of the two"


def test_certificates_of_a_connection_without_any_are_refused(tmp_path: Path) -> None:
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    assert address("rediss://localhost", ca_file=tmp_path / "ca.pem").ca_file == tmp_path / "ca.pem"
    assert refusal("redis://localhost", ca_file=tmp_path / "ca.pem").accepted == "rediss://"


def test_a_file_without_certificates_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    for name in ("ca.pem", "none.pem"):
        error = refusal("rediss://localhost", ca_file=tmp_path / name)
        assert (error.name, error.accepted) == ("redis.ca_file", "a PEM file of certificates")


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_the_line_comes_without_its_end(tmp_path: Path, end: bytes) -> None:
    (tmp_path / "password").write_bytes("h\u00e4 ".encode() + end)
    assert read_password_line(tmp_path / "password") == "h\u00e4 "


@pytest.mark.parametrize("data", [b"", b"\n", b"two\nlines", b"a line\n\n", b"null\0", b"x" * (MAX_PASSWORD_BYTES + 1)])
def test_what_is_not_one_line_is_none(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "password").write_bytes(data)
    assert read_password_line(tmp_path / "password") is None


def test_what_is_not_utf_8_is_refused_and_not_shown(tmp_path: Path) -> None:
    (tmp_path / "password").write_bytes(b"hunter2\xff")
    with pytest.raises(ValueError, match=r"^not UTF-8$") as caught:
        read_password_line(tmp_path / "password")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_a_file_at_its_limit_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("x" * MAX_PASSWORD_BYTES)
    assert read_password_line(tmp_path / "password") == "x" * MAX_PASSWORD_BYTES


def num_tries(error: Exception) -> int:
    tries = 0

    def fail() -> None:
        nonlocal tries
        tries += 1
        raise error

    with pytest.raises(type(error)):
        PatientRetry(NoBackoff(), RETRIES).call_with_retry(fail, lambda _: None)
    return tries


@pytest.mark.parametrize(
    "error", [redis.ConnectionError("lost"), redis.TimeoutError(), redis.BusyLoadingError("loading")]
)
def test_what_may_pass_is_tried_again(error: Exception) -> None:
    assert num_tries(error) == 1 + RETRIES


def test_a_wrong_password_and_a_wrong_certificate_are_final() -> None:
    assert num_tries(redis.AuthenticationError("invalid username-password pair")) == 1
    certificate = redis.ConnectionError("error 1")
    certificate.__cause__ = ssl.SSLCertVerificationError()
    assert num_tries(certificate) == 1


def num_async_tries(error: Exception) -> int:
    tries = 0

    async def fail() -> None:
        nonlocal tries
        tries += 1
        raise error

    async def disconnect(_: Exception) -> None:
        pass

    with pytest.raises(type(error)):
        asyncio.run(AsyncPatientRetry(NoBackoff(), RETRIES).call_with_retry(fail, disconnect))
    return tries


def test_a_lost_connection_is_tried_again_and_a_wrong_password_is_final() -> None:
    assert num_async_tries(redis.ConnectionError("lost")) == 1 + RETRIES
    assert num_async_tries(redis.AuthenticationError("invalid username-password pair")) == 1


@pytest.mark.parametrize(
    "error",
    [
        redis.ConnectionError("away"),
        redis.TimeoutError("slow"),
        redis.exceptions.BusyLoadingError("loading"),
        redis.exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
        redis.exceptions.ReadOnlyError("You can't write against a read only replica."),
        redis.ResponseError("MISCONF Redis is configured to save RDB snapshots"),
        redis.ResponseError("Error running script (call to f_0): @user_script:8: @user_script: 8: -OOM command"),
    ],
)
def test_what_passes_is_no_refusal(error: redis.RedisError) -> None:
    assert not is_refusal(error)


def test_a_full_redis_refuses_for_now_and_a_key_of_another_type_for_good(registry: TestRegistry) -> None:
    job_id = registry.keys.new_job_id()
    registry.redis.config_set("maxmemory", "1")
    try:
        with pytest.raises(redis.RedisError) as full:
            registry.intake().stage(job_id, 0, [b"line"])
    finally:
        registry.redis.config_set("maxmemory", "0")
    assert not is_refusal(full.value)
    registry.redis.set(registry.keys.lines(job_id), "no hash")
    with pytest.raises(redis.RedisError) as broken:
        registry.intake().stage(job_id, 0, [b"line"])
    assert is_refusal(broken.value)


def test_what_cannot_even_be_sent_is_a_refusal() -> None:
    assert is_refusal(redis.DataError("Invalid input of type"))
