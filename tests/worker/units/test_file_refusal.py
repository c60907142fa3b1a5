from __future__ import annotations

import pytest

from worker.lines.errors import LineError
from worker.runtime.planner import MAX_ERRORS, FileRefusal


def _error(code: str, index: int = 0, message: str = "bad", param: str = "url") -> LineError:
    return LineError(message, code=code, index=index, param=param)


def test_nothing_bad_is_no_refusal() -> None:
    assert not FileRefusal(3)


@pytest.mark.parametrize(
    ("of_line", "of_file"),
    [
        *((code, code) for code in ("invalid_json_line", "duplicate_custom_id", "url_mismatch", "model_mismatch")),
        ("unknown_url", "url_mismatch"), ("missing_parameter", "invalid_request"), ("line_too_long", "invalid_request"),
    ],
)  # fmt: skip
def test_a_line_has_the_code_that_a_file_is_refused_with(of_line: str, of_file: str) -> None:
    refusal = FileRefusal(3)
    refusal.add(_error(of_line, index=1))
    (error,) = refusal.errors
    assert (error.code, error.line, error.message, error.param) == (of_file, 2, "bad", "url")


def test_all_bad_lines_are_counted_and_the_first_hundred_kept() -> None:
    refusal = FileRefusal(1000)
    for index in range(1, 501):
        refusal.add(_error("invalid_json_line", index, message="x" * 10_000, param="p" * 10_000))
    assert [error.line for error in refusal.errors] == list(range(2, MAX_ERRORS + 2))
    assert all(len(error.message) <= 400 for error in refusal.errors)
    assert all(error.param == "p" * 200 for error in refusal.errors)
    assert refusal.reason.startswith("500 of the file's 1000 lines are bad; line 2: xxx")
