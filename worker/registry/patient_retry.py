"""When a command is sent to Redis once more."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Any, TypeVar

import redis
from redis.retry import Retry

T = TypeVar("T")

_REFUSED = (redis.AuthenticationError, redis.exceptions.AuthenticationWrongNumberOfArgsError)


class PatientRetry(Retry):
    """Tries again what may pass: a lost connection, a Redis that loads; not a wrong password or certificate.

    redis-py takes a wrong password for a lost connection: 49 connections in 17 s, measured, where one says it all.
    """

    def call_with_retry(
        self,
        do: Callable[[], T],
        fail: Callable[[Exception], Any] | Callable[[Exception, int], Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> T:
        """What `do` returns. Raises its last error."""
        return super().call_with_retry(
            do, fail, is_retryable=unless_refused(is_retryable), with_failure_count=with_failure_count
        )


def unless_refused(is_retryable: Callable[[Exception], bool] | None) -> Callable[[Exception], bool]:
    """Whether an error is worth another try: not a refusal, and what `is_retryable` says, if there is one."""

    def may_pass(error: Exception) -> bool:
        return not is_refusal_to_connect(error) and (is_retryable is None or is_retryable(error))

    return may_pass


def is_refusal_to_connect(error: BaseException) -> bool:
    """Whether who we are, or who the server is, was not accepted: the next try would end alike."""
    causes = (error, error.__cause__, error.__context__)
    return any(isinstance(cause, (*_REFUSED, ssl.SSLCertVerificationError)) for cause in causes)
