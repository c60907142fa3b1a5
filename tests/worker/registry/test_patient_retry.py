from __future__ import annotations

import ssl

import pytest
import redis
from redis.backoff import NoBackoff

from worker.registry.connect import PatientRetry

RETRIES = 3


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
