"""What captures decode steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

# Runs a step over static buffers; told the lengths of its rows, tokens in KV after the step.
DecodeRun = Callable[[tuple[int, ...]], None]


class GraphBackend(Protocol):
    """Turns a run over static buffers into one that launches less."""

    def capture(self, run: DecodeRun, kv_len_bounds: tuple[int, ...]) -> DecodeRun:
        """`run`, captured with bounds in the place of lengths: what is captured reads the lengths on the device.

        All that is captured shares one memory pool, so a run may overwrite whatever an earlier one left there. The
        caller keeps what it gets for as long as a run of it may be queued.

        Raises what `run` raised, or RuntimeError, where `run` cannot be captured; memory that ran out is among these
        (`is_out_of_memory`). Raises EngineFatal where the device failed: no other capture can succeed.
        """
        ...
