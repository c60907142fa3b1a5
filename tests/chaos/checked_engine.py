"""A real engine that keeps account of its KV pool while it works."""

from __future__ import annotations

import logging
from typing import Any

from engine.engine import Engine
from engine.errors import EngineFatal

POOL_IS_WHOLE = "the KV pool is whole"

logger = logging.getLogger(__name__)


class CheckedEngine:
    """Passes everything on to `engine`. Whenever that has nothing to run, and at its end, every block must be free.

    A pool that does not add up raises EngineFatal: the worker ends with 70, or logs no POOL_IS_WHOLE at its end.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> list[Any]:
        """One step; the pool is checked when it was the last one for now."""
        outputs = self._engine.step()
        if not self._engine.has_unfinished():
            self._check()
        return outputs

    def close(self) -> None:
        """Close the engine; its requests' blocks must come back."""
        self._engine.close()
        self._check()
        logger.info(POOL_IS_WHOLE)

    def _check(self) -> None:
        self._engine.check_integrity()
        stats = self._engine.stats()
        if stats.num_free_blocks != stats.num_blocks - 1:  # less the null block
            raise EngineFatal(f"{stats.num_blocks - 1 - stats.num_free_blocks} KV blocks are held by nobody")
