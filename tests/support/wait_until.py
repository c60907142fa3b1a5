"""Waiting for something another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], *, timeout_s: float = 10.0) -> None:
    """Return when `condition` holds; fail after `timeout_s` seconds."""
    until_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until_s:
            raise AssertionError(f"not so after {timeout_s} s")
        time.sleep(0.005)
