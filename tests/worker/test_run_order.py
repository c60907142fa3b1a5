"""The order of an offline run: prompts that share a prefix run together."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from settings import LimitSettings
from tests.support.request_lines import completion_line, parse, raw_line
from worker import offline as run_order
from worker.lines.errors import LineError
from worker.lines.request_line import HEAD_BYTES, LEVELS_BYTES, RequestLine, prefix_sort_key
from worker.offline import Line, LineFeed, in_file_order, in_prefix_order

LIMITS = LimitSettings(max_prompt_bytes=200)


def _raw(*prompts: str) -> list[bytes]:
    return [json.dumps({"prompt": prompt}).encode() for prompt in prompts]


def _indices(lines: Iterable[Line]) -> list[int]:
    return [line.index for line in lines]


def _errors(lines: Iterable[Line]) -> dict[int, str]:
    return {line.index: line.code for line in lines if isinstance(line, LineError)}


def test_prompts_that_begin_alike_are_neighbours_and_keep_their_numbers() -> None:
    lines = list(in_prefix_order(_raw("b: 1", "a: 2", "b: 0", "a: 1"), LIMITS))
    assert _indices(lines) == [3, 1, 2, 0]
    assert [line.custom_id for line in lines] == ["line-4", "line-2", "line-3", "line-1"]


def test_so_many_lines_are_sorted_together() -> None:
    raw_lines = _raw("e", "d", "c", "b", "a")
    assert _indices(in_prefix_order(raw_lines, LIMITS, max_sorted=2)) == [1, 0, 3, 2, 4]
    assert _indices(in_prefix_order(_raw("b", "a"), LIMITS, max_sorted=2)) == [1, 0]
    assert _indices(in_prefix_order([], LIMITS, max_sorted=2)) == []


def test_no_more_bytes_than_the_bound_wait_to_be_sorted() -> None:
    raw_lines = _raw("e", "d", "c", "b", "a")
    two_lines = len(raw_lines[0]) + 1
    assert _indices(in_prefix_order(raw_lines, LIMITS, max_sorted_bytes=two_lines)) == [1, 0, 3, 2, 4]
    assert _indices(in_prefix_order(raw_lines, LIMITS, max_sorted_bytes=1)) == [0, 1, 2, 3, 4]


def test_lines_too_many_for_memory_wait_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_order, "BYTES_IN_MEMORY", 30)
    prompts = [f"{number:03}" for number in range(100)]
    lines = list(in_prefix_order(_raw(*reversed(prompts)), LIMITS))
    assert [line.prompt_key() for line in lines if isinstance(line, RequestLine)] == [
        parse(raw).prompt_key() for raw in _raw(*prompts)
    ]


def test_both_orders_find_the_same_lines_and_the_same_errors() -> None:
    again = b'{"prompt": "0", "custom_id": "twice"}'
    raw_lines = [*_raw("z"), again, b"{", again, *_raw("x" * 300), b'{"prompt": 3}', *_raw("a")]
    sequential, by_prefix = (
        list(in_file_order(raw_lines, LIMITS)),
        list(in_prefix_order(raw_lines, LIMITS, max_sorted=3)),
    )
    assert _indices(sequential) == sorted(_indices(by_prefix)) == list(range(7))
    expected = {2: "invalid_json_line", 3: "duplicate_custom_id", 4: "line_too_long", 5: "invalid_type"}
    assert _errors(sequential) == _errors(by_prefix) == expected


def test_a_pipe_is_taken_as_it_comes() -> None:
    def slow_pipe() -> Iterator[bytes]:
        yield from _raw("b", "a")
        assert has_both.wait(5.0)

    has_both = threading.Event()
    feed = LineFeed(slow_pipe(), LIMITS, capacity=2, by_prefix=False)
    feed.start()
    lines = [*feed.take(1, 5.0), *feed.take(1, 5.0)]
    has_both.set()
    assert _indices(lines) == [0, 1]
    assert feed.take(1, 5.0) == []
    assert feed.ended


def test_lines_are_taken_together_as_they_arrive_and_an_error_after_them() -> None:
    def pipe() -> Iterator[bytes]:
        yield from _raw("a", "b", "c")
        are_read.set()
        assert goes_on.wait(5.0)
        yield from _raw("d")
        raise OSError("disk on fire")

    are_read, goes_on = threading.Event(), threading.Event()
    feed = LineFeed(pipe(), LIMITS, capacity=9, by_prefix=False)
    feed.start()
    assert are_read.wait(5.0)
    assert _indices(feed.take(2, 5.0)) == [0, 1]
    assert _indices(feed.take(2, 5.0)) == [2]
    assert feed.take(2, 0.01) == []
    assert not feed.ended
    goes_on.set()
    assert _indices(feed.take(1, 5.0)) == [3]
    with pytest.raises(OSError, match="disk on fire"):
        feed.take(2, 5.0)


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


def key(raw: bytes) -> str:
    return parse(raw).prompt_key()


def test_prompts_with_a_common_beginning_sort_together() -> None:
    texts = ["shared one", "other", "shared two", "a", "shared"]

    ordered = sorted(texts, key=lambda text: key(raw_line({"prompt": text})))

    assert ordered == ["a", "other", "shared", "shared one", "shared two"]


def test_token_prompts_sort_by_token_id() -> None:
    prompts = [[300], [4, 5], [4], [5], [4, 300]]

    ordered = sorted(prompts, key=lambda prompt: key(raw_line({"prompt": prompt})))

    assert ordered == [[4], [4, 5], [4, 300], [5], [300]]


def test_conversations_share_the_key_of_their_common_messages() -> None:
    system = {"role": "system", "content": "be brief"}
    first = key(raw_line({"messages": [system, {"role": "user", "content": "a"}]}))
    second = key(raw_line({"messages": [system, {"role": "user", "content": "b"}]}))

    assert first[:-2] == second[:-2]
    assert first != second


def test_roles_and_message_bounds_are_part_of_the_key() -> None:
    one = key(raw_line({"messages": [{"role": "user", "content": "ab"}]}))
    two = key(raw_line({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}))
    other_role = key(raw_line({"messages": [{"role": "assistant", "content": "ab"}]}))

    assert len({one, two, other_role}) == 3


def test_sampling_parameters_are_not_part_of_the_key() -> None:
    assert key(completion_line(temperature=0.5, custom_id="x")) == key(completion_line())
