"""Requests without an answer: what is said of them, and how many are too many."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from worker.cli.exit_codes import CommandError
from worker.cli.failures import SHOWN_CODES, FailureCounts, MaxFailed
from worker.cli.main import cli

ANSWER: dict[str, object] = {"custom_id": "a", "response": {"status_code": 200, "body": {}}, "error": None}
EXPIRED: dict[str, object] = {"response": None, "error": {"code": "batch_expired", "message": "too late"}}


def refused(code: str, line: int) -> dict[str, object]:
    error = {"code": code, "message": "the secret is not so", "line": line}
    return {"response": {"status_code": 400, "body": {"error": error}}, "error": None}


def counted(*records: dict[str, object]) -> FailureCounts:
    failures = FailureCounts()
    for record in records:
        failures.add(record)
    return failures


def test_failures_are_counted_by_code_with_the_first_line_of_each() -> None:
    failures = counted(ANSWER, refused("invalid_value", 2), EXPIRED, refused("invalid_value", 5), refused("x", 9))

    assert (failures.total, failures.by_code) == (4, {"invalid_value": 2, "batch_expired": 1, "x": 1})
    assert failures.text(5, "see FILE:").splitlines() == [
        "4 of 5 requests failed; see FILE:",
        "       2  invalid_value (line 2 and others)",
        "       1  batch_expired",
        "       1  x (line 9)",
    ]


def test_of_many_codes_the_most_frequent_are_shown() -> None:
    records = [refused(f"code-{n}", 1) for n in range(20) for _ in range(20 - n)]

    lines = counted(*records).text(500, "").splitlines()

    assert [line.split()[0] for line in lines[1:4]] == ["20", "19", "18"]
    assert lines[-1].split(maxsplit=1) == ["and", f"{20 - SHOWN_CODES} codes more"]


def test_a_record_that_is_not_ours_counts_by_its_status() -> None:
    assert counted({"response": {"status_code": 502}}).by_code == {"status 502": 1}
    assert counted({}).by_code == {"status None": 1}


def test_a_record_counts_once_it_is_written() -> None:
    failures, written = FailureCounts(), list[object]()
    write = failures.counting(written.append)

    write(EXPIRED)
    write(ANSWER)

    assert (written, failures.total) == ([EXPIRED, ANSWER], 1)


@pytest.mark.parametrize(
    ("most", "num_failed", "is_accepted"),
    [
        (MaxFailed(), 99, True), (MaxFailed(), 100, False), (MaxFailed(), 0, True),
        (MaxFailed("5%", percent=5), 5, True), (MaxFailed("5%", percent=5), 6, False),
        (MaxFailed("3", count=3), 3, True), (MaxFailed("3", count=3), 4, False), (MaxFailed("0", count=0), 1, False),
        (MaxFailed("200", count=200), 100, False),
    ],
)  # fmt: skip
def test_more_than_may_fail_and_all_of_them_are_errors(most: MaxFailed, num_failed: int, is_accepted: bool) -> None:
    if is_accepted:
        most.check(num_failed, 100, "job x")
        return
    with pytest.raises(CommandError, match=r"^job x: (all 100|. of 100) requests failed"):
        most.check(num_failed, 100, "job x")


def test_a_request_that_is_the_only_one_is_not_called_all() -> None:
    with pytest.raises(CommandError, match=r"^run: its only request failed$"):
        MaxFailed().check(1, 1, "run")


def test_of_no_requests_none_failed() -> None:
    MaxFailed().check(0, 0, "run")


@pytest.mark.parametrize("value", ["-1", "101%", "5 %", "many", "1.5", "", "%"])
def test_what_is_no_bound_is_exit_2(value: str) -> None:
    done = CliRunner().invoke(cli, ["watch", "x", f"--max-failed={value}"])

    assert done.exit_code == 2
    assert "accepted: 0 or more, or a share, 0% to 100%" in " ".join(done.stderr.split())
