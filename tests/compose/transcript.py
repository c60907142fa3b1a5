"""What happened and when, for people."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO


class Transcript:
    """Lines with the seconds since the start, written as they come."""

    def __init__(self, *streams: TextIO) -> None:
        self._streams = streams
        self._started_s = time.monotonic()

    def say(self, text: str) -> None:
        """One event."""
        self._write(f"{time.monotonic() - self._started_s:6.1f} s  {text}")

    def show(self, output: str) -> None:
        """What a command printed."""
        for line in output.rstrip().splitlines():
            self._write(f"          | {line.rstrip()}")

    def wait(self, what: str, condition: Callable[[], object], timeout_s: float) -> None:
        """Return once `condition` holds, and say so; an AssertionError after `timeout_s` seconds."""
        until_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < until_s, f"not so after {timeout_s:.0f} s: {what}"
            time.sleep(0.1)
        self.say(what)

    def _write(self, line: str) -> None:
        for stream in self._streams:
            print(line, file=stream, flush=True)
