from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable

from settings import LimitSettings
from worker.lines.line_error import LineError
from worker.offline.line_feed import LineFeed
from worker.offline.run_order import Line, in_file_order, in_prefix_order

LIMITS = LimitSettings(max_prompt_bytes=200)


def _file(*prompts: str) -> bytes:
    return b"".join(json.dumps({"prompt": prompt}).encode() + b"\n" for prompt in prompts)


def _indices(lines: Iterable[Line]) -> list[int]:
    return [line.index for line in lines]


def _errors(lines: Iterable[Line]) -> dict[int, str]:
    return {line.index: line.code for line in lines if isinstance(line, LineError)}


def test_prompts_that_begin_alike_stand_side_by_side_and_keep_their_numbers() -> None:
    file = io.BytesIO(b"\n\n" + _file("b: 1", "a: 2") + b"  \r\n" + _file("b: 0", "a: 1"))
    lines = list(in_prefix_order(file, LIMITS))
    assert _indices(lines) == [3, 1, 2, 0]
    assert [line.custom_id for line in lines] == ["line-4", "line-2", "line-3", "line-1"]


def test_so_many_lines_are_sorted_together() -> None:
    file = io.BytesIO(_file("e", "d", "c", "b", "a"))
    assert _indices(in_prefix_order(file, LIMITS, max_sorted=2)) == [1, 0, 3, 2, 4]
    assert _indices(in_prefix_order(io.BytesIO(_file("b", "a")), LIMITS, max_sorted=2)) == [1, 0]
    assert _indices(in_prefix_order(io.BytesIO(b""), LIMITS, max_sorted=2)) == []


def test_both_orders_find_the_same_lines_and_the_same_errors() -> None:
    again = b'{"prompt": "0", "custom_id": "twice"}\n'
    content = _file("z") + again + b"{\n" + again + _file("x" * 300) + b'{"prompt": 3}\n' + _file("a")
    sequential, by_prefix = (
        list(in_file_order(io.BytesIO(content), LIMITS)),
        list(in_prefix_order(io.BytesIO(content), LIMITS, max_sorted=3)),
    )
    assert _indices(sequential) == sorted(_indices(by_prefix)) == list(range(7))
    expected = {2: "invalid_json_line", 3: "duplicate_custom_id", 4: "line_too_long", 5: "invalid_type"}
    assert _errors(sequential) == _errors(by_prefix) == expected


def test_a_file_that_was_cut_meanwhile_has_bad_lines_and_no_missing_ones() -> None:
    file = io.BytesIO(_file("b", "a"))
    lines = in_prefix_order(file, LIMITS)
    found = [next(lines)]
    file.truncate(3)
    found += lines
    assert _indices(found) == [1, 0]
    assert _errors(found) == {0: "invalid_json_line"}


def test_a_pipe_is_taken_as_it_comes() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(_file("b", "a"))
    feed = LineFeed(os.fdopen(reading, "rb"), LIMITS, capacity=1)
    feed.start()
    lines = [feed.take(5.0), feed.take(5.0)]
    assert _indices(line for line in lines if line is not None) == [0, 1]
    assert feed.take(5.0) is None
    assert feed.ended
