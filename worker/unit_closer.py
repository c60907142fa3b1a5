"""Writes error records for the prompts of a plan or shard that will not be run: cancelled, expired or given up.

Producers use it too, so that cancelling needs no worker: it imports neither torch nor the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from settings import LimitSettings
from worker.lines.errors import LineError
from worker.lines.parse import parse_request_line
from worker.records.failure import Failure, Unfinished, error_record, line_error_record, unfinished_record
from worker.records.record import RecordContext, encode_record
from worker.registry.keys import UnitRef
from worker.registry.leases import Claim, PromptRecord, UnitLeases
from worker.registry.lifecycle import ClaimRefusal, Outcome, PutStatus, RunMode

CHUNK = 100  # prompts of one write; between writes the lease is renewed

_LOST = Failure.of_server("The request was not executed: it stopped one worker after another.", code="worker_lost")

logger = logging.getLogger(__name__)


class UnitCloser:
    """Ends units of cancelled and expired jobs, and those that crashed too many workers."""

    def __init__(self, leases: UnitLeases, limits: LimitSettings) -> None:
        self._leases = leases
        self._limits = limits

    def close_unclaimed(self, ref: UnitRef) -> None:
        """Close a unit of a job that is to end, unless a worker holds it, which then closes it."""
        claim = self._leases.claim(ref)
        if isinstance(claim, ClaimRefusal):
            return
        if claim.mode is RunMode.RUN:  # not to be closed after all
            self._leases.release(claim, count_attempt=False)
            return
        self.close(claim, claim.missing, claim.mode)

    def close(self, claim: Claim, indices: Sequence[int], mode: RunMode) -> bool:
        """Write the error record of each prompt; True if that ended the unit, and its lease with it.

        Stops early if another worker has the unit. Raises redis.RedisError when Redis cannot be had.
        """
        for start in range(0, len(indices), CHUNK):
            chunk = indices[start : start + CHUNK]
            lines = self._leases.lines(claim.ref.job_id, chunk, under=claim)
            records = [self._record(claim, index, line, mode) for index, line in zip(chunk, lines, strict=True)]
            status, _ = self._leases.put(claim, records, at_end=True)
            if status is PutStatus.JOB_DONE:
                logger.info("job finished", extra={"job_id": claim.ref.job_id})
            if status is not PutStatus.OPEN:
                return status not in (PutStatus.FENCED, PutStatus.REWOUND)
            self._leases.renew([claim])
        return False

    def _record(self, claim: Claim, index: int, raw: bytes | None, mode: RunMode) -> PromptRecord:
        context = RecordContext(claim.ref.job_id, "", claim.created_s)
        custom_id: str | None = None
        # What crashes workers may be the lines that a plan reads: they are not read again.
        if raw is not None and not (claim.ref.is_plan and mode is RunMode.LOST):
            try:
                custom_id = parse_request_line(raw, index, self._limits).custom_id
            except LineError as error:
                return PromptRecord(index, Outcome.ERROR, encode_record(line_error_record(error, context)))
        if mode is RunMode.LOST:
            record = error_record(_LOST, index, custom_id, context)
        else:
            record = unfinished_record(Unfinished[mode.name], index, custom_id, context)
        return PromptRecord(index, mode.outcome, encode_record(record))
