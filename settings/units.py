"""Numbers with their unit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True, slots=True)
class Unit:
    """What a number counts, in the plural where it has one: `s`, `bytes`, `tokens`, `sequences`."""

    name: str


Seconds = Annotated[float, Unit("s")]
WholeSeconds = Annotated[int, Unit("s")]
Bytes = Annotated[int, Unit("bytes")]
Tokens = Annotated[int, Unit("tokens")]
Blocks = Annotated[int, Unit("blocks")]
Steps = Annotated[int, Unit("steps")]
Sequences = Annotated[int, Unit("sequences")]
Prompts = Annotated[int, Unit("prompts")]
Jobs = Annotated[int, Unit("jobs")]
