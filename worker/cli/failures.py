"""Sums up requests without an answer by their error, and decides how many of them are too many."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import click

from worker.cli.exit_codes import CommandError, printable
from worker.cli.files import WriteRecord
from worker.records.record import has_failed

SHOWN_CODES = 8


class FailureCounts:
    """Counts the records without an answer by error code.

    It shows no message: messages quote what the line says, and standard error is kept in logs.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lines: dict[str, object] = {}  # the number of the first line with each code

    def add(self, record: Mapping[str, object]) -> None:
        """Take in a record, with an answer or without."""
        if not has_failed(record):
            return
        code, line = _error_of(record)
        self._counts[code] += 1
        self._lines.setdefault(code, line)

    def counting(self, write: WriteRecord) -> WriteRecord:
        """`write`, which takes in each record after it is written."""

        def write_and_count(record: Mapping[str, object]) -> None:
            write(record)
            self.add(record)

        return write_and_count

    @property
    def total(self) -> int:
        """Records without an answer so far."""
        return self._counts.total()

    @property
    def by_code(self) -> dict[str, int]:
        """How many of each code, the most frequent first."""
        return dict(self._counts.most_common())

    def text(self, num_requests: int, shown_by: str) -> str:
        """A line that says what shows them, and one for each code; `num_requests` were run."""
        lines = [f"{self.total} of {num_requests} requests failed; {shown_by}"]
        for code, count in self._counts.most_common(SHOWN_CODES):
            line = printable(str(self._lines[code]))
            first = "" if self._lines[code] is None else f" (line {line}{' and others' * (count > 1)})"
            lines.append(f"{count:8}  {code}{first}")
        if len(self._counts) > SHOWN_CODES:
            lines.append(f"{'':8}  and {len(self._counts) - SHOWN_CODES} codes more")
        return "\n".join(lines)


def _error_of(record: Mapping[str, object]) -> tuple[str, object]:
    """Code and line of a record without an answer; of one that is not ours, its HTTP status."""
    response, error = record.get("response"), record.get("error")
    status = response.get("status_code") if isinstance(response, Mapping) else None
    if isinstance(response, Mapping):
        body = response.get("body")
        error = body.get("error") if isinstance(body, Mapping) else None
    if not isinstance(error, Mapping):
        return printable(f"status {status}"), None
    return printable(str(error.get("code"))), error.get("line")


_BOUND = re.compile(r"([0-9]{1,9})|([0-9]{1,3}(?:\.[0-9]{1,6})?)%")


@dataclass(frozen=True, slots=True)
class MaxFailed:
    """How many requests may fail: a number of them, or a share. That all of them failed is never accepted."""

    text: str = "100%"
    count: int | None = None
    percent: float = 100.0  # unless there is a count

    def check(self, num_failed: int, num_requests: int, whose: str) -> None:
        """Raise CommandError if more failed than may; `whose` requests they were, such as "job s0-..."."""
        if num_failed == num_requests and num_failed > 0:
            which = f"all {num_requests} requests" if num_requests > 1 else "its only request"
            raise CommandError(f"{whose}: {which} failed")
        most = num_requests * self.percent / 100 if self.count is None else self.count
        if num_failed > most:
            accepted = f"accepted: at most {self.text} (--max-failed)"
            raise CommandError(f"{whose}: {num_failed} of {num_requests} requests failed; {accepted}")


DEFAULT_MAX_FAILED = MaxFailed()


class _MaxFailedType(click.ParamType[MaxFailed]):
    """A number, or a share such as 5%."""

    name = "bound"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> MaxFailed:
        """The bound; anything else is bad usage."""
        match = _BOUND.fullmatch(str(value))
        if match is None or float(match[2] or 0) > 100:
            self.fail(f"{value!r} is no number of requests; accepted: 0 or more, or a share, 0% to 100%", param, ctx)
        if match[1] is not None:
            return MaxFailed(match[0], count=int(match[1]))
        return MaxFailed(match[0], percent=float(match[2]))


# The function gets `max_failed`, None if it is not given.
max_failed_option = click.option(
    "--max-failed", "max_failed", type=_MaxFailedType(), metavar="N|P%",
    help="Exit 1 if more requests than this failed, and always if all did. Default 100%.",
)  # fmt: skip
