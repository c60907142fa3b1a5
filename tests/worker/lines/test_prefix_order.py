from __future__ import annotations

import sys

from hypothesis import given
from hypothesis import strategies as st

from worker.lines.request_line import HEAD_BYTES, LEVELS_BYTES, prefix_sort_key


@given(st.lists(st.text(max_size=40)))
def test_short_prompts_sort_as_their_text_does(prompts: list[str]) -> None:
    assert sorted(prompts, key=prefix_sort_key) == sorted(prompts, key=lambda text: text.encode("utf-8"))


def test_prompts_with_a_long_common_beginning_stand_side_by_side() -> None:
    head = "s" * (HEAD_BYTES + 10)
    beginnings = [head + letter * LEVELS_BYTES[0] for letter in "abcd"]
    prompts = [f"{beginning}{number}" for number in range(3) for beginning in beginnings]
    order = [prompt[HEAD_BYTES + 10] for prompt in sorted(prompts, key=prefix_sort_key)]
    groups = [letter for position, letter in enumerate(order) if position == 0 or order[position - 1] != letter]
    assert sorted(groups) == ["a", "b", "c", "d"]  # each once: no group is torn apart


def test_a_key_is_small_whatever_the_prompt() -> None:
    key = prefix_sort_key("x" * 1_000_000)
    assert sum(sys.getsizeof(part) for part in key) < 1500


def test_a_lone_surrogate_has_a_place_too() -> None:
    assert prefix_sort_key("\ud800")[0] == b"\xed\xa0\x80"
