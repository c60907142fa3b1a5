"""Names the type of what has none, such as Celery's objects and JSON from Redis."""

from __future__ import annotations

from typing import Any

# What Celery, kombu and Lua scripts hand over: only the code that takes it apart knows its shape.
Untyped = Any
