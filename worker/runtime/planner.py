"""Cuts a job's lines into shards whose prompts share prefixes, or refuses a strict job's file."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from settings import LimitSettings, WorkerSettings
from worker.broker.messages import Announcer
from worker.lines.errors import LineError
from worker.lines.files import FileChecks
from worker.lines.parse import parse_request_line
from worker.lines.request_line import PrefixKey, prefix_sort_key, shard_head
from worker.records.failure import line_error_record
from worker.records.record import RecordContext, encode_record
from worker.registry.keys import UnitRef
from worker.registry.leases import PromptRecord, UnitLeases
from worker.registry.lifecycle import Outcome, PutStatus, StopReason
from worker.runtime.held_units import HeldUnit
from worker.schemas import BatchError
from worker.unit_closer import UnitCloser

Finding = tuple[PrefixKey, int] | LineError

MAX_MODEL_CHARS = 200  # of the model that the lines name: it is sent with every status of the job
CHUNK = 64  # lines of one read: at most 16 MiB with the default limits

logger = logging.getLogger(__name__)

MAX_ERRORS = 100  # kept: enough to see what is wrong with a file; they are sent with every status of the job
MAX_MESSAGE_CHARS = 400
MAX_PARAM_CHARS = 200  # a key of the line, which may be as long as that

# Why a file is refused, by the error code of its line; other codes are an invalid_request.
_CODES = {code: code for code in (
    "invalid_json_line", "duplicate_custom_id", "url_mismatch", "model_mismatch", "model_not_found"
)} | {"unknown_url": "url_mismatch"}  # fmt: skip


class Planner:
    """Reads every line of a job, records the bad ones, and cuts the good ones into shards in prefix order.

    One bad line ends a strict job, of which then no line runs. A plan that is interrupted starts again from the first
    line; records that were written stay.
    """

    def __init__(
        self,
        leases: UnitLeases,
        announcer: Announcer,
        closer: UnitCloser,
        *,
        settings: WorkerSettings,
        limits: LimitSettings,
        model_name: str,
    ) -> None:
        self._leases = leases
        self._announcer = announcer
        self._closer = closer
        self._shard_size = settings.shard_size
        self._batch_size = settings.result_batch_size
        self._ageing_s = settings.ageing_s
        self._limits = limits
        self._model_name = model_name  # what this worker serves

    def plan(self, held: HeldUnit) -> None:
        """Plan the claimed job, or stop early with `held.stop_reason`. Raises redis.RedisError."""
        claim = held.claim
        checks = FileChecks(endpoint=claim.endpoint, is_strict=claim.is_strict, served_model=self._model_name)
        good: list[tuple[PrefixKey, int]] = []
        findings = self._findings(held, checks)
        is_open = self._refuse_file(held, findings, good) if claim.is_strict else self._record_bad(held, findings, good)
        if not is_open:
            return
        mode = held.stop_reason.closing_mode if held.stop_reason else None
        if mode is not None:
            # Bad lines keep the record that they have: an index is written once.
            held.close(self._closer, claim.missing, mode)
        elif held.stop_reason is None:
            self._cut(held, good, checks)

    def _record_bad(self, held: HeldUnit, findings: Iterator[Finding], good: list[tuple[PrefixKey, int]]) -> bool:
        """Write the bad lines' records, put the others into `good`; False if there is nothing more to plan."""
        context = RecordContext(held.claim.ref.job_id, "", held.claim.created_s)
        bad: list[PromptRecord] = []
        for finding in findings:
            if isinstance(finding, LineError):
                record = encode_record(line_error_record(finding, context))
                bad.append(PromptRecord(finding.index, Outcome.ERROR, record))
                if len(bad) >= self._batch_size and not self._put(held, bad):
                    return False
            else:
                good.append(finding)
        return not bad or self._put(held, bad)

    def _refuse_file(self, held: HeldUnit, findings: Iterator[Finding], good: list[tuple[PrefixKey, int]]) -> bool:
        """Fill `good`, or fail the job if a line is bad and there is no reason to stop; False if the job is over."""
        refusal = FileRefusal(held.claim.num_lines)
        for finding in findings:
            if isinstance(finding, LineError):
                refusal.add(finding)
                good.clear()  # memory: none of them will run
            elif not refusal:
                good.append(finding)
        if not refusal or held.stop_reason is not None:  # told to stop, we have not seen the whole file
            return True
        status, mode = self._leases.fail(held.claim, refusal.reason, refusal.errors)
        if status is PutStatus.JOB_DONE:
            logger.info("the job was refused: %s", refusal.for_log)
        held.hear(status, mode)
        return status is PutStatus.OPEN

    def _findings(self, held: HeldUnit, checks: FileChecks) -> Iterator[Finding]:
        """Each line without a record: its sort key and index, or its error. Ends early if told to stop."""
        job_id, wanted = held.claim.ref.job_id, set(held.claim.missing)
        num_lines = held.claim.num_lines
        for start in range(0, num_lines, CHUNK):
            indices = range(start, min(start + CHUNK, num_lines))
            for index, raw in zip(indices, self._leases.lines(job_id, indices), strict=True):
                try:
                    finding: Finding = self._key(index, raw, checks), index
                except LineError as error:
                    finding = error
                if held.stop_reason is not None:
                    return
                if index in wanted:  # the others have a record of an earlier try
                    yield finding

    def _key(self, index: int, raw: bytes | None, checks: FileChecks) -> PrefixKey:
        line = parse_request_line(raw, index, self._limits)
        checks.add(line)
        return prefix_sort_key(line.prompt_key())

    def _put(self, held: HeldUnit, records: list[PromptRecord]) -> bool:
        """Write records and forget them; False if there is nothing more to plan."""
        status, mode = self._leases.put(held.claim, records)
        if status is PutStatus.JOB_DONE:
            logger.info("job finished: all of its lines are bad")
        records.clear()
        held.hear(status, mode)
        return status is PutStatus.OPEN

    def _cut(self, held: HeldUnit, good: list[tuple[PrefixKey, int]], checks: FileChecks) -> None:
        good.sort()
        order = [index for _, index in good]
        shards = [order[start : start + self._shard_size] for start in range(0, len(order), self._shard_size)]
        heads = [shard_head(key) for key, _ in good[:: self._shard_size]]
        model = checks.model and checks.model[:MAX_MODEL_CHARS]
        is_ours = self._leases.planned(
            held.claim, shards, heads, ageing_s=self._ageing_s, endpoints=checks.endpoints, model=model
        )
        if not is_ours:
            held.stop(StopReason.FENCED)
            return
        held.set_written()
        job_id = held.claim.ref.job_id
        logger.info("job planned", extra={"prompts": len(order), "shards": len(shards)})
        for number in range(len(shards)):
            self._announcer.announce(UnitRef.shard(job_id, number), held.claim.priority)


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
