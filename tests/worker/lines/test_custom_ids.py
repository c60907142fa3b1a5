from __future__ import annotations

import pytest

from tests.support.request_lines import completion_line, parse
from worker.lines.errors import LineError
from worker.lines.files import CustomIds


def test_a_custom_id_may_stand_once() -> None:
    seen = CustomIds()
    seen.add(parse(completion_line(custom_id="a"), 0))
    seen.add(parse(completion_line(custom_id="b"), 1))

    with pytest.raises(LineError, match="was used by an earlier line") as raised:
        seen.add(parse(completion_line(custom_id="a"), 2))

    assert (raised.value.code, raised.value.param) == ("duplicate_custom_id", "custom_id")
    assert (raised.value.index, raised.value.custom_id) == (2, "a")


def test_a_line_number_collides_with_an_explicit_custom_id() -> None:
    seen = CustomIds()
    seen.add(parse(completion_line(custom_id="line-3"), 0))

    with pytest.raises(LineError):
        seen.add(parse(completion_line(), 2))
