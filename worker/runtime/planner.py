"""Cuts a job's lines into shards of one model each whose prompts share prefixes, or refuses the job."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter

from settings import LimitSettings, WorkerSettings
from worker.broker.messages import Announcer
from worker.lines.errors import LineError
from worker.lines.files import FileChecks, refusal
from worker.lines.parse import parse_request_line
from worker.lines.request_line import Endpoint, PrefixKey, RequestLine, prefix_sort_key, shard_head
from worker.records.failure import line_error_record
from worker.records.record import RecordContext, encode_record
from worker.registry.keys import UnitRef
from worker.registry.leases import NewShard, PromptRecord, UnitLeases
from worker.registry.lifecycle import Outcome, PutStatus, RunMode
from worker.registry.models import ModelDirectory, ServedModels
from worker.runtime.held_units import HeldUnit
from worker.schemas import BatchError
from worker.unit_closer import UnitCloser

GoodLine = tuple[str, PrefixKey, int]  # its model, what its prompt begins with, its index
Finding = GoodLine | LineError

WAITS = "or a name in limits.models, to wait for it"  # of a model that is not served yet
SETTLE_POLL_S = 0.2  # how soon a plan that waits sees that it is to stop
# Lines of one read: 64, at most 16 MiB with the default limits; then up to so many more as come to CHUNK_BYTES if they
# are like those of the read before.
CHUNK, MAX_CHUNK = 64, 512
CHUNK_BYTES = 256 * 1024

logger = logging.getLogger(__name__)

MAX_ERRORS = 100  # kept: enough to see what is wrong with a file; they are sent with every status of the job
MAX_MESSAGE_CHARS = 400
MAX_PARAM_CHARS = 200  # a key of the line, which may be as long as that

# Why a file is refused, by the error code of its line; other codes are an invalid_request.
_CODES = {code: code for code in (
    "invalid_json_line", "duplicate_custom_id", "url_mismatch", "model_mismatch", "model_not_found"
)} | {"unknown_url": "url_mismatch"}  # fmt: skip


class Planner:
    """Reads every line of a job, records the bad ones, and cuts the good ones into shards by model, in prefix order.

    A strict job ends at one bad line, and none of its lines runs; so does any job of which no line names a model where
    several are served. A plan that is interrupted starts again from the first
    line; records that were written stay.
    """

    def __init__(
        self,
        leases: UnitLeases,
        announcer: Announcer,
        closer: UnitCloser,
        directory: ModelDirectory,
        *,
        settings: WorkerSettings,
        limits: LimitSettings,
    ) -> None:
        self._directory = directory
        self._leases = leases
        self._announcer = announcer
        self._closer = closer
        self._shard_size = settings.shard_size
        self._batch_size = settings.result_batch_size
        self._ageing_s = settings.ageing_s
        self._limits = limits

    def plan(self, held: HeldUnit) -> None:
        """Plan the claimed job, or stop early with `held.stop_reason`. Raises redis.RedisError."""
        self._wait_settled(held)
        claim = held.claim
        checks = FileChecks(endpoint=claim.endpoint, is_strict=claim.is_strict)
        lines = JobLines(self._directory.read(), checks, claim.job_model, is_strict=claim.is_strict)
        good: list[GoodLine] = []
        if lines.error is not None:
            is_open = self._refuse_job(held, lines.error)
        else:
            is_open = (self._refuse_file if claim.is_strict else self._record_bad)(held, lines, good)
        if not is_open:
            return
        mode = held.stop_reason.closing_mode if held.stop_reason else None
        if mode is not None:
            # Bad lines keep the record that they have: an index is written once.
            held.close(self._closer, claim.missing, mode)
        elif held.stop_reason is None:
            self._cut(held, good, checks)

    def _wait_settled(self, held: HeldUnit) -> None:
        """Wait, where Redis has forgotten what is served, until every worker has said it again."""
        while held.stop_reason is None and (unsettled_s := self._directory.unsettled_s()) > 0:
            time.sleep(min(unsettled_s, SETTLE_POLL_S))

    def _record_bad(self, held: HeldUnit, lines: JobLines, good: list[GoodLine]) -> bool:
        """Write the bad lines' records, put the others into `good`; False if there is nothing more to plan."""
        bad: list[PromptRecord] = []
        unnamed: list[UnnamedModel] = []
        for finding in self._findings(held, lines):
            if isinstance(finding, UnnamedModel):
                unnamed.append(finding.with_traceback(None))  # which holds the line
            elif isinstance(finding, LineError):
                bad.append(_record(held, finding))
                # Not before it is certain that the job is not refused for the models of all its lines.
                is_certain = good or lines.has_names
                if is_certain and len(bad) >= self._batch_size and not self._put(held, bad):
                    return False
            else:
                good.append(finding)
        if unnamed and held.stop_reason is None:
            if not (good or lines.has_names):
                return self._refuse_job(held, unnamed[0])
            bad += [_record(held, error) for error in unnamed]
        return all(
            self._put(held, bad[start : start + self._batch_size]) for start in range(0, len(bad), self._batch_size)
        )

    def _refuse_job(self, held: HeldUnit, error: LineError) -> bool:
        """Fail the job for what is wrong with all of it; False if it is over."""
        entry = BatchError(code=error.code, message=error.message, param=error.param)
        status, mode = self._leases.fail(held.claim, error.message, [entry])
        if status is PutStatus.JOB_DONE:
            logger.info("the job was refused: %s", error.code)
        held.hear(status, mode)
        return status is PutStatus.OPEN

    def _refuse_file(self, held: HeldUnit, lines: JobLines, good: list[GoodLine]) -> bool:
        """Fill `good`, or fail the job if a line is bad and there is no reason to stop; False if the job is over."""
        refused = FileRefusal(held.claim.num_lines)
        for finding in self._findings(held, lines):
            if isinstance(finding, LineError):
                refused.add(finding)
                good.clear()  # memory: none of them will run
            elif not refused:
                good.append(finding)
        if not refused or held.stop_reason is not None:  # told to stop, we have not seen the whole file
            return True
        status, mode = self._leases.fail(held.claim, refused.reason, refused.errors)
        if status is PutStatus.JOB_DONE:
            logger.info("the job was refused: %s", refused.for_log)
        held.hear(status, mode)
        return status is PutStatus.OPEN

    def _findings(self, held: HeldUnit, lines: JobLines) -> Iterator[Finding]:
        """Each line without a record: its model, sort key and index, or its error. Ends early if told to stop."""
        wanted = set(held.claim.missing)
        num_lines = held.claim.num_lines
        start, size = 0, CHUNK
        while start < num_lines:
            indices = range(start, min(start + size, num_lines))
            raws = self._leases.lines(held.claim.ref.job_id, indices, under=held.claim)
            num_bytes = sum(len(raw) for raw in raws if raw is not None)
            start, size = indices.stop, min(max(CHUNK_BYTES * len(indices) // max(num_bytes, 1), CHUNK), MAX_CHUNK)
            for index, raw in zip(indices, raws, strict=True):
                try:
                    finding: Finding = self._good_line(index, raw, lines)
                except LineError as error:
                    finding = error
                if held.stop_reason is not None:
                    return
                if index in wanted:  # the others have a record of an earlier try
                    yield finding

    def _good_line(self, index: int, raw: bytes | None, lines: JobLines) -> GoodLine:
        line = parse_request_line(raw, index, self._limits)
        return lines.add(line), prefix_sort_key(line.prompt_key()), index

    def _put(self, held: HeldUnit, records: list[PromptRecord]) -> bool:
        """Write records and forget them; False if there is nothing more to plan."""
        status, mode = self._leases.put(held.claim, records)
        if status is PutStatus.JOB_DONE:
            logger.info("job finished: all of its lines are bad")
        records.clear()
        held.hear(status, mode)
        return status is PutStatus.OPEN

    def _cut(self, held: HeldUnit, good: list[GoodLine], checks: FileChecks) -> None:
        good.sort()
        shards = list(_shards(good, self._shard_size))
        models = {shard.model for shard in shards}
        status = self._leases.planned(
            held.claim,
            shards,
            ageing_s=self._ageing_s,
            endpoints=checks.endpoints,
            model=models.pop() if len(models) == 1 else None,
        )
        held.hear(status, RunMode.RUN)
        if status is not PutStatus.UNIT_DONE:
            return
        job_id = held.claim.ref.job_id
        logger.info("job planned", extra={"prompts": len(good), "shards": len(shards)})
        for number, shard in enumerate(shards):
            self._announcer.announce(UnitRef.shard(job_id, number), held.claim.priority, shard.model)


def _record(held: HeldUnit, error: LineError) -> PromptRecord:
    context = RecordContext(held.claim.ref.job_id, "", held.claim.created_s)
    return PromptRecord(error.index, Outcome.ERROR, encode_record(line_error_record(error, context)))


def _shards(good: list[GoodLine], size: int) -> Iterator[NewShard]:
    for model, of_model in groupby(good, key=itemgetter(0)):
        lines = list(of_model)
        for start in range(0, len(lines), size):
            shard = lines[start : start + size]
            yield NewShard([index for _, _, index in shard], shard_head(shard[0][1]), model)


class UnnamedModel(LineError):
    """A line that names no model, where several could be meant."""


class JobLines:
    """Tells which model each line of a job is for, and compares the lines with one another.

    That is the one that the line names, else the one that the job was submitted for, else the only one that is served.
    The lines of a strict file, which keeps OpenAI's rules, are all for one model, by one name if they give one.
    """

    def __init__(
        self, served: ServedModels, checks: FileChecks, job_model: str | None, *, is_strict: bool = False
    ) -> None:
        self._served = served
        self._checks = checks
        self._is_strict = is_strict
        self._first_name: str | None = None  # that a good line gives
        self._first_model: str | None = None  # of a good line
        self._job_model = None if job_model is None else served.resolve(job_model)
        self._of_endpoints = {endpoint: served.of_endpoint(endpoint) for endpoint in Endpoint}
        self.has_names = False  # whether a line has named a model
        self.error: LineError | None = None  # why no line can run
        if job_model is not None and self._job_model is None:
            message = f"the job's model is {job_model!r}; accepted: {self._accepted}"
            self.error = LineError(message, code="model_not_found", index=0, param="model")

    def add(self, line: RequestLine) -> str:
        """The model of the next line. Raises LineError for a bad one, with which later lines are not compared."""
        model = self._model_of(line)
        if self._is_strict:
            self._check_is_one_model(line, model)
        self._checks.add(line)
        self._first_name, self._first_model = self._first_name or line.body.model, self._first_model or model
        return model

    def _check_is_one_model(self, line: RequestLine, model: str) -> None:
        name, first = line.body.model, self._first_name
        if None not in (name, first) and name != first:
            accepted = f"accepted: {first!r}, as a line before it has it"
            raise refusal(line, f"model is {name!r}; {accepted}", "model_mismatch", "model")
        if self._first_model not in (None, model):
            accepted = f"accepted: {self._first_model!r}, which lines before it are for"
            raise refusal(line, f"model is {name or model!r}; {accepted}", "model_mismatch", "model")

    @property
    def _accepted(self) -> str:
        return f"{', '.join(map(repr, self._served.names))}, {WAITS}"

    def _model_of(self, line: RequestLine) -> str:
        name = line.body.model
        if name is None:
            return self._job_model or self._only_one(line)
        self.has_names = True
        model = self._served.resolve(name)
        if model is None:
            raise refusal(line, f"model is {name!r}; accepted: {self._accepted}", "model_not_found", "model")
        if self._job_model not in (None, model):
            accepted = f"accepted: {self._job_model!r}, which the job was submitted for"
            raise refusal(line, f"model is {name!r}; {accepted}", "model_mismatch", "model")
        return model

    def _only_one(self, line: RequestLine) -> str:
        models = self._of_endpoints[line.endpoint]
        if len(models) == 1:
            return models[0]
        named = ", ".join(map(repr, models))
        raise UnnamedModel(
            f"no model is named, and {len(models)} are served; accepted: {named}, in the lines or as --model",
            code="model_not_found",
            index=line.index,
            param="model",
            custom_id=line.custom_id,
        )


class FileRefusal:
    """Collects a file's bad lines, in bounded memory."""

    def __init__(self, num_lines: int) -> None:
        self._num_lines = num_lines
        self._num_bad = 0
        self._errors: list[BatchError] = []

    def __bool__(self) -> bool:
        """Whether there is a bad line."""
        return self._num_bad > 0

    @property
    def errors(self) -> tuple[BatchError, ...]:
        """The first bad lines."""
        return tuple(self._errors)

    @property
    def reason(self) -> str:
        """The refusal in a sentence."""
        first = self._errors[0]
        return f"{self._num_bad} of the file's {self._num_lines} lines are bad; line {first.line}: {first.message}"

    @property
    def for_log(self) -> str:
        """The refusal without a word of the file: a message quotes values, and a param may be a key of the line."""
        first = self._errors[0]
        return f"{self._num_bad} of {self._num_lines} lines are bad; line {first.line}: {first.code}"

    def add(self, error: LineError) -> None:
        """Count a bad line."""
        self._num_bad += 1
        if len(self._errors) < MAX_ERRORS:
            code = _CODES.get(error.code, "invalid_request")
            message = error.message[:MAX_MESSAGE_CHARS]
            param = None if error.param is None else error.param[:MAX_PARAM_CHARS]
            self._errors.append(BatchError(code=code, message=message, line=error.index + 1, param=param))
