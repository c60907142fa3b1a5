"""Shows progress: a bar on a terminal, plain lines elsewhere; and jobs in words, coloured on a terminal."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Self, TextIO

import click

from worker.cli.exit_codes import printable
from worker.schemas import JobState, JobStatus, RequestCounts

REFRESH_S = 0.2
UNKNOWN_COLUMNS = 80
LONGEST_BAR, SHORTEST_BAR = 30, 10

PLAIN_EVERY_S = 10.0

SHORTEST_S = 0.1  # over which a rate says anything
WINDOW_S = 15.0  # of rates: long enough to even out bursts of records, short enough to show that a worker came or went

_COLOURS = {
    JobState.COMPLETED: "green",
    JobState.FAILED: "red",
    JobState.EXPIRED: "red",
    JobState.CANCELLED: "yellow",
    JobState.CANCELLING: "yellow",
}

JOB_COLUMNS = f"{'JOB':40} {'STATUS':12} {'ENDED':>15} {'FAILED':>8} {'PRI':>3} {'TENANT':12} CREATED"


class ProgressLine:
    """One line that is overwritten again and again; silent if `stream` is no terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._enabled = stream.isatty()
        self._shown_at_s = float("-inf")
        self._width = 0

    @property
    def is_due(self) -> bool:
        """Whether a new text would be shown now."""
        return self._enabled and time.monotonic() - self._shown_at_s >= REFRESH_S

    def show(self, *texts: str, done: float | None = None) -> None:
        """Replace the line's text once it has been there long enough to read.

        `texts` say the same, the fullest first: the first that fits is shown. `done`, 0 to 1, is drawn as a bar.
        """
        if self.is_due:
            self._write(texts, done)

    def close(self, *texts: str, done: float | None = None) -> None:
        """Show the text and end the line."""
        if self._enabled:
            self._write(texts, done)
            self.leave()

    def leave(self) -> None:
        """End the line as it is, if there is one."""
        if self._width:
            self._stream.write("\n")
            self._stream.flush()
            self._width = 0

    def _write(self, texts: Sequence[str], done: float | None) -> None:
        # A text that reaches the last column wraps, and \r does not come back from the next line. Nor should the
        # terminal's ^C behind it wrap, which would stay there above what is said of the interruption.
        columns = max(self._columns() - 1 - len("^C"), 1)
        room = columns if done is None else columns - SHORTEST_BAR - len("[] ")
        text = next((text for text in texts if len(text) <= room), texts[-1])
        line = (text if done is None else f"{_bar(done, columns - len(text) - len('[] '))}{text}")[:columns]
        self._stream.write("\r" + line.ljust(self._width))
        self._stream.flush()
        self._width = len(line)
        self._shown_at_s = time.monotonic()

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or UNKNOWN_COLUMNS
        except OSError:
            return UNKNOWN_COLUMNS


def _bar(done: float, room: int) -> str:
    """A bar of at most `room` columns within its brackets, and a space; empty if it were too short."""
    width = min(room, LONGEST_BAR)
    if width < SHORTEST_BAR:
        return ""
    filled = int(done * width)
    return f"[{'#' * filled}{'-' * (width - filled)}] "


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job or a run is."""

    state: str
    done: int  # requests with a record
    total: int | None  # None: not known, or not yet
    ends: str  # how these ended, such as "4 completed, 1 failed"
    output_tokens: int
    prefix_hits: float  # share of the prompt tokens, 0 to 1
    has_ended: bool = False
    waits_for: str = ""  # why nothing moves

    @classmethod
    def of_job(cls, job: JobStatus, waits_for: str = "") -> Self:
        """A job's, from its status."""
        counts, usage = job.request_counts, job.usage
        hits = usage.cached_tokens / usage.input_tokens if usage.input_tokens else 0.0
        return cls(
            job.status.value, counts.finished, counts.total, counts_words(counts), usage.output_tokens, hits,
            job.status.is_terminal, waits_for,
        )  # fmt: skip

    @property
    def lacks(self) -> str:
        """What of `ends` has no answer; empty where everything has."""
        _, *others = self.ends.split(", ")
        return ", ".join(part for part in others if not part.startswith("0 "))

    @property
    def share(self) -> float | None:
        """Of the requests that are done, 0 to 1; None where their number is not known, or there are none."""
        return min(self.done / self.total, 1.0) if self.total else None


class ProgressBar:
    """A bar on a terminal; elsewhere, with `plain_lines`, a line every ten seconds and for each change of state."""

    def __init__(self, stream: TextIO, *, plain_lines: bool, state: str = "") -> None:
        """`state`: the one to begin with, which gets no line at once."""
        self._stream = stream
        self._line = ProgressLine(stream)
        self._is_plain = plain_lines and not stream.isatty()
        self._rates = Rates()
        self._printed_at_s = float("-inf")
        if state:  # it begins now, with nothing done
            self._printed_at_s = time.monotonic()
            self._rates.add(0, 0, self._printed_at_s)
        self._printed = (state, "")
        self._has_ended = False

    @property
    def is_shown(self) -> bool:
        """Whether anything ever is."""
        return self._is_plain or self._stream.isatty()

    @property
    def is_due(self) -> bool:
        """Whether something would be shown now, if the state is as it was."""
        return self._line.is_due or (self._is_plain and self._is_plain_due(time.monotonic()))

    def show(self, progress: Progress) -> None:
        """Show how far it is; to be called often. What has ended is shown once."""
        if self._has_ended:
            return
        self._has_ended = progress.has_ended
        now_s = time.monotonic()
        self._rates.add(progress.done, progress.output_tokens, now_s)
        texts = progress_texts(progress, self._rates)
        if progress.has_ended:
            self._line.close(*texts, done=progress.share)
        else:
            self._line.show(*texts, done=progress.share)
        state = (progress.state, progress.waits_for)
        if self._is_plain and (state != self._printed or self._is_plain_due(now_s)):
            self._stream.write(f"{texts[0]}\n")
            self._stream.flush()
            self._printed_at_s, self._printed = now_s, state

    def leave(self, progress: Progress | None = None) -> None:
        """End the bar's line, after a last look if there is one: what is written next has a line of its own."""
        if progress is not None and not self._has_ended:
            self._rates.add(progress.done, progress.output_tokens, time.monotonic())
            self._line.close(*progress_texts(progress, self._rates), done=progress.share)
        self._line.leave()

    def _is_plain_due(self, now_s: float) -> bool:
        return now_s - self._printed_at_s >= PLAIN_EVERY_S


class Rates:
    """Prompts and tokens a second over the last WINDOW_S."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()  # when, prompts, output tokens

    def add(self, num_prompts: int, num_tokens: int, now_s: float) -> None:
        """Take in how many are done at `now_s`, seconds of a monotonic clock."""
        self._seen.append((now_s, num_prompts, num_tokens))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - WINDOW_S:
            self._seen.popleft()

    @property
    def are_known(self) -> bool:
        """Whether something was done since the first look, or nothing for so long that this says something."""
        return self.prompts_per_s > 0 or self._span_s >= WINDOW_S

    @property
    def prompts_per_s(self) -> float:
        """Records a second, those of failed prompts too; 0 before the second look."""
        return self._per_s(1)

    @property
    def output_tokens_per_s(self) -> float:
        """Generated tokens a second; a job's count when their prompt's record is written."""
        return self._per_s(2)

    def _per_s(self, field: int) -> float:
        return (self._seen[-1][field] - self._seen[0][field]) / self._span_s if self._span_s >= SHORTEST_S else 0.0

    @property
    def _span_s(self) -> float:
        return self._seen[-1][0] - self._seen[0][0] if self._seen else 0.0


def progress_texts(progress: Progress, rates: Rates) -> Sequence[str]:
    """How much of how much, how it ended or why it waits, rates, time left, prefix hits: the fullest line first.

    Each further one leaves out what a narrow terminal can do without; all have what failed and the time left. What is
    not known yet is in none.
    """
    if progress.total == 0:  # a job that was refused as a whole
        return [progress.state]
    share = progress.share
    of_total = "" if share is None else f"/{progress.total} ({share:.0%})"
    head = f"{progress.state} {progress.done}{of_total}"
    if progress.waits_for:  # in place of all else
        why, _, _ = progress.waits_for.partition(" (")  # what to do about it
        return [f"{head}, {progress.waits_for}", f"{head}, {why}"]
    full = f"{head}: {progress.ends}" if progress.done else head
    brief = f"{head}: {progress.lacks}" if progress.lacks else head
    hits = f"prefix hits {progress.prefix_hits:.0%}"
    if not rates.are_known or (progress.has_ended and not rates.prompts_per_s):  # long ago
        return [f"{full}, {hits}", full, brief] if progress.done else [head]
    left = []
    if not progress.has_ended and progress.total is not None and rates.prompts_per_s:
        left = [f"ETA {_left((progress.total - progress.done) / rates.prompts_per_s)}"]
    prompts, tokens = f"{rates.prompts_per_s:.1f} prompts/s", f"{rates.output_tokens_per_s:.0f} tokens/s out"
    forms = [[full, prompts, tokens, *left, hits], [full, prompts, tokens, *left], [full, prompts, *left]]
    return [", ".join(form) for form in (*forms, [brief, prompts, *left], [brief, *left])]


def _left(seconds_left: float) -> str:
    seconds = round(seconds_left)
    if seconds < 60:
        return f"{seconds} s"
    minutes, hours = seconds // 60 % 60, seconds // 3600
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds % 60:02} s"


def coloured(text: str, colour: str) -> str:
    """`text` in this colour; `click.echo` leaves the colour out where it does not write to a terminal.

    A terminal without colours is told by TERM=dumb, and whoever wants none by NO_COLOR (no-color.org).
    """
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return click.style(text, fg=colour)


def _of_state(text: str, state: JobState) -> str:
    return coloured(text, _COLOURS[state]) if state in _COLOURS else text


def job_row(job: JobStatus) -> str:
    """One line of a table under JOB_COLUMNS."""
    counts, tenant = job.request_counts, printable(job.tenant)
    done, state = f"{counts.finished}/{counts.total}", _of_state(f"{job.status.value:12}", job.status)
    return f"{job.id:40} {state} {done:>15} {counts.faulty:>8} {job.priority:>3} {tenant:12} {_time(job.created_at)}"


def no_worker_serves(model: str) -> str:
    """Why a job of this model does not go on."""
    return f"no worker serves {printable(model)} (millrace worker --model DIR starts one)"


def job_details(job: JobStatus) -> str:
    """Everything about one job, a line each."""
    counts, usage = job.request_counts, job.usage
    lines = [
        f"job        {job.id}",
        f"status     {_of_state(job.status.value, job.status)}{f': {printable(job.error)}' if job.error else ''}",
        *([f"model      {printable(job.model)}"] if job.model else []),
        *(f"waits      {no_worker_serves(model)}" for model in job.waiting_for),
        f"requests   {counts.total}: {counts_words(counts)}",
        f"shards     {job.shards_done}/{job.shards_total}",
        f"tokens     {usage.input_tokens} in ({usage.cached_tokens} cached), {usage.output_tokens} out"
        + (f" ({usage.resumed_tokens} resumed)" if usage.resumed_tokens else ""),
        f"priority   {job.priority}",
        f"tenant     {printable(job.tenant)}",
        *(f"metadata   {printable(key)}={printable(value)}" for key, value in job.metadata.items()),
        f"created    {_time(job.created_at)}",
    ]
    for label, when in (
        ("deadline", job.expires_at), ("finished", job.finished_at), ("kept until", job.results_expire_at),
    ):  # fmt: skip
        if when is not None:
            lines.append(f"{label:10} {_time(when)}")
    return "\n".join(lines)


def counts_text(job: JobStatus) -> str:
    """What became of a job's requests."""
    counts = job.request_counts
    return f"{job.status.value}: {counts_words(counts)}, of {counts.total} requests"


def counts_words(counts: RequestCounts) -> str:
    """How the prompts with a record ended; the numbers add up to them."""
    parts = [f"{counts.completed} completed", f"{counts.faulty} failed"]
    undone = {"cancelled": counts.cancelled, "expired": counts.expired}
    return ", ".join([*parts, *(f"{number} {word}" for word, number in undone.items() if number)])


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
