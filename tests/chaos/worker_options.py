"""What is unusual about a worker under test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WorkerOptions:
    """Travels as JSON on the worker program's command line; imports nothing, see there."""

    engine: dict[str, Any] | None = None  # options of a FakeEngine; none: the real one, on `model.path`
    visibility_timeout_s: int = 4  # the same for all workers of one Redis
    die_at: str = ""  # a name of DEATHS
    clock_shift_s: float = 0.0
    has_other_scripts: bool = False  # Lua of the same effect with another digest, as of another version
    log_level: str = "INFO"  # DEBUG: also what Celery says of every message
