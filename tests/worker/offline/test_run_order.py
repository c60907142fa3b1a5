from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator

import pytest

from settings import LimitSettings
from tests.support.request_lines import parse
from worker import offline as run_order
from worker.lines.errors import LineError
from worker.lines.request_line import RequestLine
from worker.offline import Line, LineFeed, in_file_order, in_prefix_order

LIMITS = LimitSettings(max_prompt_bytes=200)


def _raw(*prompts: str) -> list[bytes]:
    return [json.dumps({"prompt": prompt}).encode() for prompt in prompts]


def _indices(lines: Iterable[Line]) -> list[int]:
    return [line.index for line in lines]


def _errors(lines: Iterable[Line]) -> dict[int, str]:
    return {line.index: line.code for line in lines if isinstance(line, LineError)}


def test_prompts_that_begin_alike_stand_side_by_side_and_keep_their_numbers() -> None:
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


def test_lines_are_taken_together_as_far_as_they_are_there_and_an_error_behind_them() -> None:
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
