"""The examples of each step of the training."""

from __future__ import annotations

import random
from itertools import islice

from tokenizers import Tokenizer

from tests.demo_model.batch import Batch, make_batch
from tests.demo_model.task import Task

STEPS_TOGETHER = 8  # examples of so many steps are sorted by length, which leaves a tenth of the padding


class TrainingBatches:
    """Batches by task and step, the same for the same seed wherever the training begins."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._groups: dict[str, tuple[int, list[Batch]]] = {}  # task -> number of the group, its batches

    def batch(self, task: Task, step: int) -> Batch:
        """The batch of one step."""
        number = step // STEPS_TOGETHER
        if self._groups.get(task.name, (-1,))[0] != number:
            self._groups[task.name] = (number, self._make_group(task, number))
        return self._groups[task.name][1][step % STEPS_TOGETHER]

    def _make_group(self, task: Task, number: int) -> list[Batch]:
        seed = self._seed * 1_000_003 + number + 1
        size = task.batch_size
        examples = sorted(
            islice(task.examples(seed, False), size * STEPS_TOGETHER), key=lambda example: len(example.user)
        )
        batches = [
            make_batch(self._tokenizer, task, examples[start : start + size]) for start in range(0, len(examples), size)
        ]
        random.Random(seed).shuffle(batches)
        return batches
