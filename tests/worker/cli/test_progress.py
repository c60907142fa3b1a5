"""What is shown of a job that runs: its rates, the line's words, the bar."""

from __future__ import annotations

import io
import os
import time
from typing import NamedTuple

import pytest

from tests.support.request_lines import job_status
from worker.cli import progress as module
from worker.cli.progress import (
    WINDOW_S,
    Progress,
    ProgressBar,
    ProgressLine,
    Rates,
    counts_text,
    job_details,
    job_row,
    progress_texts,
)
from worker.schemas import JobState, RequestCounts, batch_object

HINT = " (millrace worker --model DIR starts one)"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2

    def rows(self) -> list[str]:
        return [row.strip() for row in self.getvalue().split("\r")[1:]]


class Size(NamedTuple):
    columns: int


def rates_of(*seen: tuple[float, Progress]) -> Rates:
    rates = Rates()
    for now_s, progress in seen:
        rates.add(progress.done, progress.output_tokens, now_s)
    return rates


def running(completed: int, failed: int = 0, output_tokens: int = 0) -> Progress:
    return Progress.of_job(job_status(JobState.IN_PROGRESS, completed, failed, output_tokens=output_tokens))


def ended() -> Progress:
    return Progress.of_job(job_status(JobState.COMPLETED, 10))


def test_rates_are_those_of_prompts_and_tokens_since_the_first_look() -> None:
    rates = rates_of((100.0, running(1)), (102.0, running(4, 1, 300)))
    assert (rates.prompts_per_s, rates.output_tokens_per_s) == (2.0, 150.0)


def test_before_the_second_look_there_is_no_rate() -> None:
    assert rates_of().prompts_per_s == 0.0
    assert rates_of((1.0, running(5))).prompts_per_s == 0.0
    assert rates_of((1.0, running(5)), (1.0, running(6))).prompts_per_s == 0.0


def test_what_is_longer_ago_than_the_window_does_not_count() -> None:
    seen = [(float(second), running(min(second, 10))) for second in range(30)]
    assert rates_of(*seen[:11]).prompts_per_s == 1.0
    assert rates_of(*seen[:21]).prompts_per_s == pytest.approx(5 / WINDOW_S)
    assert rates_of(*seen).prompts_per_s == 0.0


def test_the_line_has_rates_time_left_hit_rate_and_errors() -> None:
    rates = rates_of((0.0, running(0)), (2.0, running(4, 1, 301)))
    assert progress_texts(running(4, 1), rates)[0] == (
        "in_progress 5/10 (50%): 4 completed, 1 failed, 2.5 prompts/s, 150 tokens/s out, ETA 2 s, prefix hits 25%"
    )


@pytest.mark.parametrize(
    ("elapsed_s", "left"), [(0.9, "ETA 8 s"), (60.0, "ETA 9 min 00 s"), (1000.0, "ETA 2 h 30 min")]
)
def test_time_left_is_told_in_what_people_count_it_in(elapsed_s: float, left: str) -> None:
    assert all(
        left in text for text in progress_texts(running(1), rates_of((0.0, running(0)), (elapsed_s, running(1))))
    )


def test_rates_and_time_left_are_told_once_they_are_known() -> None:
    assert progress_texts(running(0), rates_of((0.0, running(0)), (10.0, running(0)))) == ["in_progress 0/10 (0%)"]
    looked = progress_texts(running(5), rates_of((0.0, running(5))))
    assert looked[0] == "in_progress 5/10 (50%): 5 completed, 0 failed, prefix hits 25%"
    stalled = progress_texts(running(5), rates_of(*((float(second), running(5)) for second in range(20))))[0]
    assert "0.0 prompts/s" in stalled
    assert not [text for text in (*looked, stalled, *progress_texts(ended(), Rates())) if "ETA" in text]


@pytest.mark.parametrize(
    ("columns", "row"),
    [(40, "[" + "#" * 15 + "-" * 15 + "] abcd"), (20, "[#####-----] abcd"), (16, "abcd"), (6, "abc"), (2, "a")],
)
def test_the_bar_takes_the_room_there_is_but_for_what_ctrl_c_echoes(
    monkeypatch: pytest.MonkeyPatch, columns: int, row: str
) -> None:
    monkeypatch.setattr(os, "get_terminal_size", lambda _: Size(columns))
    terminal = Terminal()
    ProgressLine(terminal).show("abcd", done=0.5)
    assert terminal.rows() == [row]


@pytest.mark.parametrize(
    ("columns", "failed", "text"),
    [
        (140, 0, ": 5 completed, 0 failed, 2.5 prompts/s, 150 tokens/s out, ETA 2 s, prefix hits 25%"),
        (110, 0, ": 5 completed, 0 failed, 2.5 prompts/s, 150 tokens/s out, ETA 2 s"),
        (100, 1, ": 4 completed, 1 failed, 2.5 prompts/s, ETA 2 s"),
        (80, 1, ": 1 failed, 2.5 prompts/s, ETA 2 s"),
        (80, 0, ", 2.5 prompts/s, ETA 2 s"),
        (60, 1, ": 1 failed, ETA 2 s"),
        (60, 0, ", ETA 2 s"),
    ],
)
def test_a_narrow_terminal_leaves_out_what_matters_least(
    monkeypatch: pytest.MonkeyPatch, columns: int, failed: int, text: str
) -> None:
    monkeypatch.setattr(os, "get_terminal_size", lambda _: Size(columns))
    terminal, progress = Terminal(), running(5 - failed, failed)
    texts = progress_texts(progress, rates_of((0.0, running(0)), (2.0, running(5, 0, 300))))

    ProgressLine(terminal).show(*texts, done=progress.share)

    [row] = terminal.rows()
    assert row.startswith("[#####")
    assert row.endswith(f"-] in_progress 5/10 (50%){text}")
    assert len(row) <= columns - len("^C")


def test_the_reason_why_nothing_moves_fits_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "get_terminal_size", lambda _: Size(80))
    terminal = Terminal()
    waiting = Progress.of_job(
        job_status(JobState.VALIDATING), "no worker is up (millrace worker --model DIR starts one)"
    )

    ProgressLine(terminal).show(*progress_texts(waiting, Rates()), done=0.0)

    assert terminal.rows() == [f"[{'-' * 30}] validating 0/10 (0%), no worker is up"]


def test_a_job_that_ended_before_the_first_look_has_no_rates() -> None:
    looked, seen = rates_of((0.0, ended())), rates_of((0.0, running(5)), (2.0, ended()))

    assert progress_texts(ended(), looked)[0] == "completed 10/10 (100%): 10 completed, 0 failed, prefix hits 25%"
    assert "2.5 prompts/s" in progress_texts(ended(), seen)[0]


def test_the_bar_grows_to_its_end_and_the_last_line_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFRESH_S", 0.0)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: Size(200))
    terminal = Terminal()
    bar = ProgressBar(terminal, plain_lines=True)
    for progress in (running(0), running(5), ended(), ended()):
        bar.show(progress)
    assert [row.count("#") for row in terminal.rows()] == [0, 15, 30]
    assert terminal.getvalue().count("\n") == 1
    assert terminal.getvalue().endswith("\n")


def test_what_was_cancelled_or_expired_is_told_apart_from_what_failed() -> None:
    counts = RequestCounts(total=9, completed=2, failed=7, cancelled=4, expired=2)
    job = job_status(JobState.CANCELLED).model_copy(update={"request_counts": counts})

    assert counts_text(job) == "cancelled: 2 completed, 1 failed, 4 cancelled, 2 expired, of 9 requests"
    assert batch_object(job)["request_counts"] == {"total": 9, "completed": 2, "failed": 7}


def test_why_nothing_moves_is_said_behind_how_much_is_done() -> None:
    waiting = Progress.of_job(job_status(JobState.VALIDATING), "no worker is up")
    assert progress_texts(waiting, Rates())[0] == "validating 0/10 (0%), no worker is up"


def test_a_job_that_was_refused_as_a_whole_has_no_figures() -> None:
    refused = job_status(JobState.FAILED).model_copy(
        update={"request_counts": RequestCounts(total=0, completed=0, failed=0)}
    )
    progress = Progress.of_job(refused)
    assert (progress_texts(progress, Rates()), progress.share) == (["failed"], None)


def test_of_a_number_that_is_not_known_there_is_no_share_and_no_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "get_terminal_size", lambda _: Size(200))
    piped, terminal = Progress("running", 5, None, "4 completed, 1 failed", 0, 0.0), Terminal()

    ProgressBar(terminal, plain_lines=True, state="running").show(piped)

    [row] = terminal.rows()
    assert row == "running 5: 4 completed, 1 failed, prefix hits 0%"


def test_plain_lines_come_with_a_change_of_state_or_of_what_it_waits_for() -> None:
    stream = io.StringIO()
    bar = ProgressBar(stream, plain_lines=True)
    for waits_for in ("", "", "no worker is up", "no worker is up", ""):
        bar.show(Progress.of_job(job_status(JobState.VALIDATING), waits_for))
    bar.show(ended())

    assert [line.count("no worker") for line in stream.getvalue().splitlines()] == [0, 1, 0, 0]


def test_a_run_gets_no_line_at_once_and_one_after_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    bar = ProgressBar(stream, plain_lines=True, state="running")

    bar.show(Progress("running", 1, 10, "1 completed, 0 failed", 0, 0.0))
    assert stream.getvalue() == ""
    later_s = time.monotonic() + 10.0
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    bar.show(Progress("running", 5, 10, "5 completed, 0 failed", 0, 0.0))

    assert stream.getvalue() == (
        "running 5/10 (50%): 5 completed, 0 failed, 0.5 prompts/s, 0 tokens/s out, ETA 10 s, prefix hits 0%\n"
    )


def test_a_bar_that_is_left_stays_and_what_follows_has_its_own_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "get_terminal_size", lambda _: Size(200))
    terminal = Terminal()
    bar = ProgressBar(terminal, plain_lines=True)
    bar.show(running(5))

    bar.leave()
    bar.leave()

    assert terminal.getvalue().count("\n") == 1
    assert "in_progress 5/10" in terminal.getvalue()


def test_a_bar_may_be_left_with_a_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "get_terminal_size", lambda _: Size(200))
    terminal = Terminal()

    ProgressBar(terminal, plain_lines=True, state="running").leave(running(10))

    [row] = terminal.rows()
    assert "in_progress 10/10 (100%)" in row
    assert terminal.getvalue().count("\n") == 1


def test_a_bar_that_has_ended_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "get_terminal_size", lambda _: Size(200))
    terminal = Terminal()
    bar = ProgressBar(terminal, plain_lines=True, state="running")
    bar.show(ended())

    bar.leave(ended())

    assert len(terminal.rows()) == 1
    assert terminal.getvalue().count("\n") == 1


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_who_wants_no_colours_gets_none(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    done = job_status(JobState.COMPLETED, 10)
    assert "\x1b[32mcompleted" in job_row(done)
    assert "\x1b[32mcompleted" in job_details(done)

    monkeypatch.setenv(name, value)

    assert "\x1b" not in job_row(done) + job_details(done)


def test_a_job_tells_its_model_and_those_that_nobody_serves() -> None:
    job = job_status(JobState.IN_PROGRESS, 3).model_copy(update={"model": "bge-small", "waiting_for": ("bge-small",)})

    lines = job_details(job).splitlines()

    assert "model      bge-small" in lines
    assert "waits      no worker serves bge-small (millrace worker --model DIR starts one)" in lines
