"""Chooses which lines of its input a `millrace run` runs: all, those without a record, or those that failed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime

import click

from settings import Settings
from worker.cli.exit_codes import BadUsage, CommandError, refusals_in_a_line
from worker.cli.files import RecordPaths, can_be_read_again, is_stream, refuse_same_file
from worker.cli.kept_records import EarlierRecords, earlier_files
from worker.lines.errors import UnreadableInput
from worker.lines.files import InputFile, LinesDigest, read_input_files
from worker.offline import JOB_ID, Wanted, every_line
from worker.requests.served_model import served_model_name


@dataclass(frozen=True, slots=True)
class RunPart:
    """What one run does of its input, and what ties its records to those of earlier runs."""

    run_id: str = JOB_ID  # stands in the record ids; with a digest of the input if that can be read again
    is_wanted: Wanted = every_line
    num_left: int | None = None  # lines to be run; None: not known before the input's end
    is_done: bool = False  # earlier runs left nothing to do
    num_kept: int = 0  # records of earlier runs in the output
    num_kept_failed: int = 0  # of these
    created_s: int | None = None  # Unix time of the records, None for now
    appends: bool = False  # records go behind those that are there


@dataclass(frozen=True, slots=True)
class EarlierRuns:
    """What --resume, --overwrite and --retry ask for."""

    resume: bool
    overwrite: bool
    retry_path: str | None

    def check(self, files: Sequence[InputFile], paths: RecordPaths) -> None:
        """Raise BadUsage for what cannot be done with this input or output, and for what contradicts itself."""
        if self.resume and self.overwrite:
            raise BadUsage("--resume keeps the records that --overwrite replaces; accepted: one of them")
        option = "--resume" if self.resume else "--retry"
        if self.resume or self.retry_path is not None:
            for file in files:
                if not can_be_read_again(file):
                    raise BadUsage(f"{option}: input {file.name} cannot be read a second time; accepted: files")
        for path in paths:
            if self.resume and is_stream(path):
                raise BadUsage(f"--resume: output {path} cannot be read again; accepted: a file or a directory")
            for earlier in [] if self.retry_path is None else earlier_files(self.retry_path):
                refuse_same_file(path, other=earlier, role="file of --retry")

    def part(self, files: Sequence[InputFile], paths: RecordPaths, settings: Settings, held: ExitStack) -> RunPart:
        """What to run; `held`: the locks of the output files, see hold_output.

        Files of an earlier run that was killed are mended with --resume. Raises BadUsage for an output that exists and
        may not be replaced, and for records of another input or model, CommandError for an input that cannot be read.
        """
        self._refuse_existing(paths)
        if not all(map(can_be_read_again, files)):
            return RunPart()
        try:
            lines = LinesDigest.of(read_input_files(files, settings.limits.max_prompt_bytes))
        except UnreadableInput as error:
            raise CommandError(f"input or output failed: {error}") from error
        run_id = f"{JOB_ID}-{lines.digest}"
        chosen = None if self.retry_path is None else _failed_lines(self.retry_path, run_id)
        earlier = EarlierRecords(run_id)
        if self.resume:
            _take_up(earlier, paths, held)
            _check_model(earlier, settings, paths)
        done = earlier.answered | earlier.failed
        num_left = lines.num_lines - len(done) if chosen is None else len(chosen - done)
        if self.resume:
            click.echo(f"{len(done)} records are kept, {num_left} of {lines.num_lines} lines are to be run", err=True)

        def is_wanted(index: int) -> bool:
            return index not in done and (chosen is None or index in chosen)

        is_done = num_left == 0 and (self.resume or chosen is not None)
        num_failed = len(earlier.failed - earlier.answered)
        return RunPart(
            run_id, is_wanted, num_left, is_done, len(done), num_failed, earlier.created_s, appends=self.resume
        )

    def _refuse_existing(self, paths: RecordPaths) -> None:
        for path in paths:
            if self.resume or is_stream(path) or os.path.getsize(path) == 0:
                continue
            if not self.overwrite:
                accepted = "--resume to go on with it, --overwrite to replace it, or another output"
                raise BadUsage(f"{path} holds the records of an earlier run; accepted: {accepted}")
            when = datetime.fromtimestamp(os.path.getmtime(path), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            found = f"{os.path.getsize(path):,} bytes, last written {when}"
            click.echo(f"{path} ({found}) is replaced as soon as the model is loaded", err=True)


def _failed_lines(path: str, run_id: str) -> set[int]:
    """The lines that failed in an earlier run and have no answer in it."""
    earlier = EarlierRecords(run_id)
    for file in earlier_files(path):
        earlier.read(file)
    failed = earlier.failed - earlier.answered
    click.echo(f"{path}: {len(failed)} lines failed and are to be run again", err=True)
    return failed


def _take_up(earlier: EarlierRecords, paths: RecordPaths, held: ExitStack) -> None:
    """Read all of the output before any of it is mended: it may be of another input."""
    found = [earlier.read(path) for path in paths]
    for whole in found:
        if whole.is_torn:
            click.echo(f"{whole.path}: its last record is cut off and is taken out; its line runs again", err=True)
        whole.mend(held)


def _check_model(earlier: EarlierRecords, settings: Settings, paths: RecordPaths) -> None:
    if settings.model.path is None:
        return  # loading it says so
    with refusals_in_a_line():
        name = served_model_name(settings.model)
    others = sorted(earlier.models - {name})
    if others:
        accepted = "the same model, or another output"
        raise BadUsage(f"{paths.output} has answers of model {others[0]!r}, not of {name!r}; accepted: {accepted}")
