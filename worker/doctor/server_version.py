"""Which server answers, and how old it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

OLDEST_REDIS = (6, 2)  # celery 5.7


@dataclass(frozen=True, slots=True)
class ServerVersion:
    """Redis or Valkey, which forked from Redis 7.2 and has said `redis_version:7.2.4` ever since."""

    product: str  # Redis or Valkey
    text: str  # as the server says it
    number: tuple[int, int, int]  # what is missing, or no number, is 0

    @classmethod
    def of(cls, info: Mapping[str, str]) -> Self:
        """Of the fields of INFO."""
        is_valkey = "valkey_version" in info
        text = info["valkey_version"] if is_valkey else info.get("redis_version", "unknown")
        parts = [int(part) if part.isdecimal() else 0 for part in text.split(".")]
        major, minor, patch = (*parts, 0, 0, 0)[:3]
        return cls("Valkey" if is_valkey else "Redis", text, (major, minor, patch))

    @property
    def series(self) -> tuple[int, int]:
        """What gets fixes of its own, such as 7.4."""
        return self.number[:2]

    @property
    def is_supported(self) -> bool:
        """Whether the queue works on it."""
        return self.product == "Valkey" or self.series >= OLDEST_REDIS
