"""The options of a job, as the clients take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict


class SubmitArguments(TypedDict, total=False):
    """The fields of SubmitOptions, for type checkers; SubmitOptions checks the values and has the defaults."""

    priority: int
    deadline_s: float | None
    tenant: str
    metadata: Mapping[str, str]
    idempotency_key: str | None
    endpoint: str | None
    strict: bool
    traceparent: str | None
