from __future__ import annotations

import pytest
import redis

from tests.support.redis_server import redis_executable
from worker.doctor.server import ServerVersion


def test_a_real_server_tells_its_version(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        info = {key: str(value) for key, value in client.info().items()}

    version = ServerVersion.of(info)

    assert version.product == "Redis", redis_executable()
    assert version.text == info["redis_version"]
    assert version.is_supported


@pytest.mark.parametrize(
    ("text", "number", "is_supported"),
    [
        ("6.2.14", (6, 2, 14), True),
        ("8.10.1", (8, 10, 1), True),
        ("7.4", (7, 4, 0), True),
        ("6.0.20", (6, 0, 20), False),
        ("7.9.240-rc1", (7, 9, 0), True),
        ("unknown", (0, 0, 0), False),
    ],
)
def test_what_a_redis_says_is_read(text: str, number: tuple[int, int, int], is_supported: bool) -> None:
    version = ServerVersion.of({"redis_version": text})

    assert (version.product, version.number, version.is_supported) == ("Redis", number, is_supported)


def test_valkey_is_told_from_the_redis_it_claims_to_be() -> None:
    version = ServerVersion.of({"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": "8.1.3"})

    assert (version.product, version.text, version.series) == ("Valkey", "8.1.3", (8, 1))
