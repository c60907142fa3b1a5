from __future__ import annotations

import pytest
import redis

from tests.support.registry import TestRegistry
from worker.registry.connect import is_refusal


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


def test_a_full_redis_refuses_nothing_for_good_and_a_key_of_another_type_does(registry: TestRegistry) -> None:
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
