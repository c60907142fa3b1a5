from __future__ import annotations

import re
from itertools import islice

import pytest

from tests.demo_model.task import Task
from tests.demo_model.tasks import all_tasks

TASKS = {task.name: task for task in all_tasks()}


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())
def test_no_held_out_question_is_trained_on(task: Task) -> None:
    trained = set(islice(task.examples(1, False), 6_000))
    held_out = set(islice(task.examples(2, True), 1000))

    assert len(held_out) > 700
    assert not {example.user for example in trained} & {example.user for example in held_out}


def test_a_sum_is_the_sum_and_its_pair_is_held_out_in_all_of_its_forms() -> None:
    pairs = {}
    for held_out in (False, True):
        examples = list(islice(TASKS["sums"].examples(1, held_out), 3000))
        numbers = [tuple(map(int, re.findall(r"\d+", example.user))) for example in examples]
        assert [str(sum(pair)) for pair in numbers] == [example.answer for example in examples]
        pairs[held_out] = set(numbers)
    assert not pairs[False] & pairs[True]


def test_a_day_is_held_out_in_all_of_its_forms() -> None:
    days = [{example.answer for example in islice(TASKS["dates"].examples(1, held), 5000)} for held in (False, True)]

    assert not days[0] & days[1]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", day) for day in days[0] | days[1])
