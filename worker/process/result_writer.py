"""Writing records."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import redis

from worker.process.held_unit import HeldUnit
from worker.registry.claim import Claim
from worker.registry.prompt_record import PromptRecord
from worker.registry.put_status import PutStatus
from worker.registry.redis_faults import is_refusal
from worker.registry.run_mode import RunMode
from worker.registry.stop_reason import StopReason
from worker.registry.unit_leases import UnitLeases

RETRY_S = 0.5
PUT_WAIT_S = 0.2  # how soon a full queue sees that its unit has to stop
FULL_WAIT_S = 1.0  # for room in a full queue, from when a unit is to be given back
# Of one write. Redis does nothing else meanwhile (4 MiB: some 10 ms), and takes no value above proto-max-bulk-len
# (512 MiB) nor a command above client-query-buffer-limit (1 GiB): 200 records with many logprobs can come to that.
MAX_BATCH_BYTES = 4 * 1024 * 1024
# Redis closes the connection on a value that is too large for it, without an answer. A record larger than a batch that
# ends this many writes so, each with the client's own six retries, while Redis is well, is taken to be one.
OVERSIZE_TRIES = 3

logger = logging.getLogger(__name__)


class ResultWriter:
    """Writes records to Redis, each unit's together, as fast as Redis takes them; never waits to fill a batch.

    While Redis cannot be had it keeps trying, and its full queue holds the shards back. A record that Redis refuses
    is replaced by `replace_refused(claim, record)`, a small error record, so that the others go on.
    """

    def __init__(
        self,
        leases: UnitLeases,
        *,
        batch_size: int,
        replace_refused: Callable[[Claim, PromptRecord], PromptRecord],
    ) -> None:
        self._leases = leases
        self._batch_size = batch_size
        self._replace_refused = replace_refused
        self._records: queue.Queue[tuple[HeldUnit, PromptRecord]] = queue.Queue(maxsize=10 * batch_size)

    def put(self, held: HeldUnit, record: PromptRecord) -> bool:
        """Queue a record; waits while the queue is full. False if the record was dropped because its unit is lost,
        or is to be given back and there was no room for a while.
        """
        held.add_unwritten(1)
        while held.stop_reason is not StopReason.FENCED:
            try:
                self._records.put((held, record), timeout=PUT_WAIT_S)
            except queue.Full:
                if held.released_for_s < FULL_WAIT_S:
                    continue
                break
            return True
        held.add_unwritten(-1)
        return False

    def run(self, stopping: threading.Event) -> None:
        """Write until told to stop and the queue is empty."""
        while not (stopping.is_set() and self._records.empty()):
            for held, records in self._next_batch():
                for batch in _batches(records):
                    self._write(held, batch, stopping)
                held.add_unwritten(-len(records))

    def _next_batch(self) -> list[tuple[HeldUnit, list[PromptRecord]]]:
        by_unit: dict[int, tuple[HeldUnit, list[PromptRecord]]] = {}
        num_bytes = 0
        for position in range(self._batch_size):
            try:
                held, record = self._records.get(block=position == 0, timeout=PUT_WAIT_S)
            except queue.Empty:
                break
            by_unit.setdefault(id(held), (held, []))[1].append(record)
            num_bytes += len(record.record)
            if num_bytes >= MAX_BATCH_BYTES:
                break
        return list(by_unit.values())

    def _write(self, held: HeldUnit, records: Sequence[PromptRecord], stopping: threading.Event) -> None:
        num_tries = 0
        while held.stop_reason is not StopReason.FENCED:
            num_tries += 1
            try:
                status, mode = self._leases.put(held.claim, records)
            except redis.RedisError as error:
                logger.warning("could not write %d records of %s: %s", len(records), held.claim.ref, error)
                if self._is_refused(records, error, num_tries):
                    self._write_refused(held, records, stopping)
                    return
                if stopping.is_set():
                    return  # the unit is given back or its lease runs out; these prompts run again
                time.sleep(RETRY_S)
                continue
            self._tell(held, status, mode)
            return

    def _is_refused(self, records: Sequence[PromptRecord], error: redis.RedisError, num_tries: int) -> bool:
        """Whether trying these records once more is of no use."""
        is_oversize = len(records) == 1 and len(records[0].record) > MAX_BATCH_BYTES
        if not is_refusal(error) and not (is_oversize and num_tries >= OVERSIZE_TRIES):
            return False
        return self._leases.can_be_had()

    def _write_refused(self, held: HeldUnit, records: Sequence[PromptRecord], stopping: threading.Event) -> None:
        if len(records) > 1:
            for record in records:
                self._write(held, [record], stopping)
            return
        replacement = self._replace_refused(held.claim, records[0])
        if replacement == records[0]:
            # Not the record's fault, then: its job's keys are broken. Its lease runs out, and that is an attempt.
            logger.error("Redis takes no record of %s: it is given up", held.claim.ref)
            held.stop(StopReason.FENCED)
            return
        logger.error("record %d of %s was refused and is replaced by an error", records[0].index, held.claim.ref)
        self._write(held, [replacement], stopping)

    @staticmethod
    def _tell(held: HeldUnit, status: PutStatus, mode: RunMode) -> None:
        if status is PutStatus.FENCED:
            held.stop(StopReason.FENCED)
        elif status is not PutStatus.OPEN:
            held.set_written()
        elif mode is RunMode.CANCELLED:
            held.stop(StopReason.CANCELLED)
        elif mode is RunMode.EXPIRED:
            held.stop(StopReason.EXPIRED)


def _batches(records: Sequence[PromptRecord]) -> Iterator[list[PromptRecord]]:
    """The records in writes of at most MAX_BATCH_BYTES, or of one record."""
    batch: list[PromptRecord] = []
    num_bytes = 0
    for record in records:
        if batch and num_bytes + len(record.record) > MAX_BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(record)
        num_bytes += len(record.record)
    yield batch
