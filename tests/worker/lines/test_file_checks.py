from __future__ import annotations

import pytest

from tests.support.request_lines import CHAT, COMPLETIONS, chat_line, completion_line, parse
from worker.lines.errors import LineError
from worker.lines.files import FileChecks
from worker.lines.request_line import Endpoint


def _checks(*, strict: bool = False, endpoint: Endpoint | None = None) -> FileChecks:
    return FileChecks(endpoint=endpoint, is_strict=strict, served_model="Qwen3-0.6B")


def _codes(checks: FileChecks, *lines: bytes) -> list[str | None]:
    """What each line is refused with, None for a good one."""
    codes: list[str | None] = []
    for index, raw in enumerate(lines):
        try:
            checks.add(parse(raw, index))
        except LineError as error:
            codes.append(error.code)
        else:
            codes.append(None)
    return codes


def test_by_default_lines_may_name_any_endpoint_and_model() -> None:
    checks = _checks()
    assert _codes(checks, chat_line(model="a"), completion_line(model="b"), chat_line()) == [None, None, None]
    assert checks.endpoints == (CHAT, COMPLETIONS)
    assert checks.model is None


def test_by_default_a_custom_id_may_stand_once() -> None:
    assert _codes(_checks(), completion_line(custom_id="a"), chat_line(custom_id="a")) == [None, "duplicate_custom_id"]


@pytest.mark.parametrize("strict", [False, True])
def test_every_line_names_the_endpoint_that_the_job_was_submitted_for(strict: bool) -> None:
    checks = _checks(strict=strict, endpoint=Endpoint.CHAT_COMPLETIONS)
    assert _codes(checks, completion_line(custom_id="a"), chat_line(custom_id="a")) == ["url_mismatch", None]
    assert checks.endpoints == (CHAT,)


def test_the_lines_of_a_strict_file_name_the_first_ones_endpoint() -> None:
    checks = _checks(strict=True)
    assert _codes(checks, chat_line(), completion_line(), chat_line()) == [None, "url_mismatch", None]


def test_the_lines_of_a_strict_file_name_one_model_if_they_name_one() -> None:
    lines = [completion_line(), *(completion_line(model=name) for name in ("Qwen3-0.6B", "Qwen/Qwen3-0.6B"))]
    checks = _checks(strict=True)
    assert _codes(checks, *lines, completion_line()) == [None, None, "model_mismatch", None]
    assert checks.model == "Qwen3-0.6B"


def test_the_model_of_a_strict_file_is_served() -> None:
    assert _codes(_checks(strict=True), completion_line(model="gpt-4o")) == ["model_not_found"]
    assert _codes(_checks(strict=True), completion_line(model="Qwen/Qwen3-0.6B")) == [None]


def test_lines_that_name_no_model_are_the_served_ones() -> None:
    checks = _checks()
    _codes(checks, completion_line(), chat_line())
    assert checks.model == "Qwen3-0.6B"
