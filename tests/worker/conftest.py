"""The registry's classes over the tests' Redis."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.registry import TestRegistry


@pytest.fixture
def registry(redis_url: str) -> Iterator[TestRegistry]:
    registry = TestRegistry.at(redis_url)
    yield registry
    registry.redis.close()
