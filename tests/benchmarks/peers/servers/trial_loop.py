"""What every side's process does: load once, then a trial for each line of standard input.

Only the standard library is imported here: the peers' processes run it in environments of their own.

A line: {"prompts": [[token id, ..], ..], "max_tokens": N}. First answer, when loaded: {"about": {..}}; then for each
line {"seconds": S, "outputs": [[token id, ..], ..]}, outputs in the order of the prompts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import TypedDict

Generate = Callable[[list[list[int]], int], list[list[int]]]


class TrialAnswer(TypedDict):
    """What a trial gave."""

    seconds: float  # of `generate` alone
    outputs: list[list[int]]


def serve(load: Callable[[], tuple[Generate, dict[str, str]]]) -> None:
    """Answer until standard input ends. `load` returns what runs a trial, and a description of versions and types."""
    answers = os.fdopen(os.dup(1), "w")  # libraries print to standard output: from here on that is standard error
    os.dup2(2, 1)
    generate, about = load()
    _answer(answers.write, {"about": about})
    answers.flush()
    for line in sys.stdin:
        trial = json.loads(line)
        start = time.perf_counter()
        outputs = generate(trial["prompts"], trial["max_tokens"])
        answer: TrialAnswer = {"seconds": time.perf_counter() - start, "outputs": outputs}
        _answer(answers.write, answer)
        answers.flush()


def _answer(write: Callable[[str], object], value: object) -> None:
    write(json.dumps(value) + "\n")
