"""One thing the model learns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.demo_model.example import Example


@dataclass(frozen=True, slots=True)
class Task:
    """A system prompt, and examples without end of what is asked under it."""

    name: str
    system: str
    examples: Callable[[int, bool], Iterator[Example]]  # of a seed; held out from training or for it
    batch_size: int  # examples of it in a step of the training
    is_exercise: bool = False  # not an end in itself: has no goal, and is left out in the end
