"""Which steps are profiled."""

from __future__ import annotations

import pytest

from settings import ProfileSettings

FILTERED = ProfileSettings(every_steps=1, max_tokens=128, min_seqs=4)


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "selected"), [(128, 4, True), (129, 4, False), (128, 3, False), (1, 5, True)]
)
def test_the_filters_bound_tokens_from_above_and_requests_from_below(
    num_tokens: int, num_seqs: int, selected: bool
) -> None:
    assert FILTERED.selects(0, num_tokens, num_seqs) is selected


def test_one_step_in_so_many_is_selected() -> None:
    profile = ProfileSettings(every_steps=9)

    assert [step for step in range(30) if profile.selects(step, 1, 1)] == [0, 9, 18, 27]


def test_absent_filters_select_everything() -> None:
    assert ProfileSettings(every_steps=1).selects(7, 1_000_000, 1)
