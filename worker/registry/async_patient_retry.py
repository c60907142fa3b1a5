"""When a command is sent to Redis once more, in an event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from redis.asyncio.retry import Retry

from worker.registry.patient_retry import unless_refused

T = TypeVar("T")


class AsyncPatientRetry(Retry):
    """PatientRetry for redis.asyncio."""

    async def call_with_retry(
        self,
        do: Callable[[], Awaitable[T]],
        fail: Callable[[Exception], Any] | Callable[[Exception, int], Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> T:
        """What `do` returns. Raises its last error."""
        return await super().call_with_retry(
            do, fail, is_retryable=unless_refused(is_retryable), with_failure_count=with_failure_count
        )
