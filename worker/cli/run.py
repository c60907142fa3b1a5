"""`millrace run`: runs a file through an engine in this process."""

from __future__ import annotations

import dataclasses
import json
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from engine.errors import EngineError
from settings import EffectiveSettings, LimitSettings
from worker.cli.exit_codes import BadUsage, CommandError, ExitCode, refusals_in_a_line, stop_signals
from worker.cli.failures import DEFAULT_MAX_FAILED, FailureCounts, MaxFailed, max_failed_option
from worker.cli.files import (
    GZIP_SUFFIX,
    OUTPUT_HELP,
    STANDARD,
    RecordPaths,
    WriteRecord,
    input_files,
    is_stream,
    open_output,
    record_output,
    refuse_same_file,
    write_line,
)
from worker.cli.kept_records import hold_output
from worker.cli.objects import refuse_objects
from worker.cli.options import (
    as_local_name,
    complete_directory,
    complete_file,
    ignore_param_option,
    input_options,
    load_command_settings,
    read_ignored_params,
    set_option,
)
from worker.cli.progress import Progress, ProgressBar, coloured
from worker.cli.run_part import EarlierRuns, RunPart
from worker.lines.files import InputFile, read_input_files
from worker.lines.ignored import IgnoredParams
from worker.offline import JOB_ID, LineFeed, OfflineRun, RunSummary
from worker.requests.step_engine import request_window, spare_collections

if TYPE_CHECKING:
    from engine.encoder import EncoderEngine
    from engine.engine import Engine
    from engine.execution.profile import PassTrace

RUNNING, COMPLETED = "running", "completed"


class Arguments(TypedDict):
    """What click passes to `run`."""

    input_paths: tuple[str, ...]
    output_path: str
    resume: bool
    overwrite: bool
    retry_path: str | None
    model: str | None
    max_failed: MaxFailed | None
    as_json: bool
    summary_path: str | None
    profile_path: str | None
    ignored_params: tuple[str, ...]
    assignments: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Work:
    """Which lines are run."""

    files: Sequence[InputFile]
    part: RunPart  # tells the lines by the files' bytes, with the parameters that are ignored
    ignored: IgnoredParams

    def feed(self, limits: LimitSettings, *, capacity: int) -> LineFeed:
        """Where the run takes them from; `capacity`: how many are read ahead."""
        lines = self.ignored.strip(read_input_files(self.files, limits.max_prompt_bytes))
        by_prefix = all(file.is_complete for file in self.files)
        return LineFeed(lines, limits, capacity=capacity, by_prefix=by_prefix, is_wanted=self.part.is_wanted)


@click.command("run")
@input_options
@click.option(
    "-o", "--output", "output_path", required=True, metavar="FILE", callback=as_local_name,
    shell_complete=complete_file,
    help=f"Result lines, in the order they finish; a file that holds some is refused. {OUTPUT_HELP}",
)  # fmt: skip
@click.option(
    "--resume", is_flag=True,
    help="Keep the records of the output and run the lines that have none; from the beginning if there are none yet.",
)  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace the records of the output, once the model is loaded.")
@click.option(
    "--retry", "retry_path", metavar="FILE", callback=as_local_name, shell_complete=complete_file,
    help="Run only the lines that failed in FILE, which an earlier run of this input wrote (or its directory).",
)  # fmt: skip
@click.option("--model", metavar="DIR", shell_complete=complete_directory, help="Checkpoint directory (model.path).")
@max_failed_option
@click.option(
    "--json", "as_json", is_flag=True, help="Print the run's figures as JSON at the end. With -o - to stderr."
)
@click.option(
    "--summary", "summary_path", metavar="FILE", callback=as_local_name, help="Write the run's figures to FILE as JSON."
)
@click.option(
    "--profile", "profile_path", metavar="FILE", callback=as_local_name,
    help="Write a Chrome trace of the steps that engine.profile.* selects to FILE.",
)  # fmt: skip
@ignore_param_option
@set_option
def run(**arguments: Unpack[Arguments]) -> None:
    """Run the request lines of each FILE offline: no Redis, the same engine.

    Each record is written the moment it exists. Progress goes to stderr, and at the end the failed requests, summed up
    by error. Ctrl-C stops after the current step: the output keeps every finished record, and the exit code is 130. If
    the engine breaks, its requests end in error records and the exit code is 1, as it is if every request failed.
    However a run ended, the same command with --resume goes on: every line gets one record.
    """
    refuse_objects(
        output=arguments["output_path"],
        retry=arguments["retry_path"],
        summary=arguments["summary_path"],
        profile=arguments["profile_path"],
    )
    effective = load_command_settings(arguments["assignments"], {"model.path": arguments["model"]})
    ignored = read_ignored_params(arguments["ignored_params"], effective.settings.limits)
    files, paths = input_files(arguments["input_paths"]), RecordPaths.of(arguments["output_path"])
    _refuse_overwriting(files, paths, arguments["profile_path"])
    earlier = EarlierRuns(arguments["resume"], arguments["overwrite"], arguments["retry_path"])
    earlier.check(files, paths)
    with ExitStack() as held:
        for path in paths:
            hold_output(path, held)  # results that cannot be written are not worth loading a model for
        part = earlier.part(files, paths, effective.settings, held)
        summary, was_stopped = _run_part(_Work(files, part, ignored), paths, effective, arguments)
    if was_stopped:
        if goes_on := _goes_on(part, paths):
            click.echo(f"interrupted{goes_on}", err=True)
        sys.exit(ExitCode.INTERRUPTED)
    num_failed, num_records = part.num_kept_failed + summary.failed, part.num_kept + summary.requests
    (arguments["max_failed"] or DEFAULT_MAX_FAILED).check(num_failed, num_records, "run")


def _goes_on(part: RunPart, paths: RecordPaths) -> str:
    may_resume = part.run_id != JOB_ID and not any(map(is_stream, paths))
    return "; the same command with --resume goes on" if may_resume else ""


@contextmanager
def _named(files: str, hint: str = "") -> Iterator[None]:
    """In the block an OSError is CommandError with the names of the files that are written there."""
    try:
        yield
    except OSError as error:  # a full disk: what was buffered cannot be written at the end either
        raise CommandError(f"{files}: {error}{hint}") from error


def _run_part(
    work: _Work, paths: RecordPaths, effective: EffectiveSettings, arguments: Arguments
) -> tuple[RunSummary, bool]:
    """Run it and write its figures; these, and whether a signal stopped it. Raises CommandError if it broke off."""
    failures, summary_path = FailureCounts(), arguments["summary_path"]
    with _pass_trace(arguments["profile_path"], effective) as trace:
        # Earlier results are replaced only once the model is loaded; until then Ctrl-C ends the command at once.
        engine, load_s = (None, 0.0) if work.part.is_done else _load_engine(effective, trace)
        with (
            _named(", ".join(paths), _goes_on(work.part, paths)),
            stop_signals(signal.SIGINT, signal.SIGTERM) as should_stop,
            record_output(paths, appends=work.part.appends) as write,
        ):
            done = None if engine is None else _run(engine, work, failures.counting(write), load_s, should_stop)
            summary, failure = done or (RunSummary(), None)
        figures = json.dumps({**dataclasses.asdict(summary), "errors": failures.by_code})
        if summary_path is not None:
            with _named(summary_path), open_output(summary_path) as file:
                write_line(file, figures)
        if arguments["as_json"]:
            click.echo(figures, err=paths.output == STANDARD)
        if failures.total:
            click.echo(coloured(failures.text(summary.requests, _shown_by(paths)), "red"), err=True)
        if failure is not None:
            raise failure
    return summary, should_stop()


def _shown_by(paths: RecordPaths) -> str:
    """What shows the failed requests of this output."""
    if paths.errors is not None:
        return f"{shlex.quote(paths.errors)} has them:"
    if paths.output == STANDARD:
        return "their records are among the others:"
    grep = "zgrep" if paths.output.endswith(GZIP_SUFFIX) else "grep"
    # The text stands in no record with an answer but once: within strings quotes are escaped.
    return f"{grep} -v '\"status_code\":200,' {shlex.quote(paths.output)} shows them:"


def _refuse_overwriting(files: Sequence[InputFile], paths: RecordPaths, profile_path: str | None) -> None:
    if profile_path == STANDARD:
        raise BadUsage("--profile -: accepted: a file")
    written = [*paths] if profile_path is None else [*paths, profile_path]
    for path in written:
        for file in files:
            refuse_same_file(path, other=file.name, role="input")
    if profile_path is not None:
        for path in paths:
            refuse_same_file(profile_path, other=path, role="output")


@contextmanager
def _pass_trace(path: str | None, effective: EffectiveSettings) -> Iterator[PassTrace | None]:
    """The trace that --profile asks for; its file is complete at the end of the block, even after an error."""
    if path is None:
        yield None
        return
    try:
        with open_output(path) as file:
            from engine.execution.profile import PassTrace  # noqa: PLC0415  # torch comes with it

            trace = PassTrace(file, effective.settings.engine.profile.max_steps)
            try:
                yield trace
            finally:
                trace.close()
    except OSError as error:
        raise CommandError(f"{path}: the trace is not complete: {error}") from error


def _load_engine(effective: EffectiveSettings, trace: PassTrace | None) -> tuple[Engine | EncoderEngine, float]:
    """The engine, and the seconds that loading it took without torch's import."""
    from engine.loading.load import load_engine  # noqa: PLC0415  # torch comes with it

    started_s = time.monotonic()
    with refusals_in_a_line():
        engine = load_engine(effective, trace)
    spare_collections()
    return engine, time.monotonic() - started_s


def _run(
    engine: Engine | EncoderEngine,
    work: _Work,
    write: WriteRecord,
    load_s: float,
    should_stop: Callable[[], bool],
) -> tuple[RunSummary, CommandError | None]:
    """The figures, also of a run that broke off, and the error that broke it off."""
    window = request_window(engine.settings.engine.max_num_seqs)
    job_id, created_s = work.part.run_id, work.part.created_s
    with refusals_in_a_line():
        run = OfflineRun(engine, engine.settings.model, window=window, write=write, job_id=job_id, created_s=created_s)
    progress = ProgressBar(sys.stderr, plain_lines=True, state=RUNNING)

    def show_progress() -> None:
        if progress.is_due:
            progress.show(_progress(run.summary(load_s), work.part.num_left))

    feed = work.feed(engine.settings.limits, capacity=window)
    feed.start()
    failure = None
    try:
        run.run(feed, should_stop, show_progress)
    except EngineError as error:
        failure = CommandError(f"the engine stopped: {error}")
    except OSError as error:
        failure = CommandError(f"input or output failed: {error}")
    finally:
        engine.close()
    summary = dataclasses.replace(run.summary(load_s), ignored_params=work.ignored.counts)
    progress.leave(_progress(summary, work.part.num_left))
    click.echo(_summary_text(summary), err=True)
    if work.ignored.text:
        click.echo(work.ignored.text, err=True)
    return summary, failure


def _progress(summary: RunSummary, num_lines: int | None) -> Progress:
    hits = summary.cached_tokens / summary.prompt_tokens if summary.prompt_tokens else 0.0
    is_done = summary.requests == num_lines
    state = COMPLETED if is_done else RUNNING
    return Progress(state, summary.requests, num_lines, _ends(summary), summary.output_tokens, hits, is_done)


def _ends(summary: RunSummary) -> str:
    return f"{summary.requests - summary.failed} completed, {summary.failed} failed"


def _summary_text(summary: RunSummary) -> str:
    rate = summary.output_tokens / summary.elapsed_s if summary.elapsed_s > 0 else 0.0
    hits = summary.cached_tokens / summary.prompt_tokens if summary.prompt_tokens else 0.0
    return (
        f"{summary.requests} done: {_ends(summary)}, {summary.output_tokens} tokens out "
        f"({rate:.1f}/s), prefix hits {hits:.0%}"
    )
