"""Writes records and resume states to Redis in batches, and replaces a record that Redis refuses."""

from __future__ import annotations

import dataclasses
import json
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

import redis
from structlog.contextvars import bound_contextvars

from worker.records.failure import Failure, error_record
from worker.records.record import RecordContext, encode_record
from worker.registry.connect import is_refusal
from worker.registry.leases import Claim, PromptRecord, PromptResumeState, UnitLeases
from worker.registry.lifecycle import Outcome, PutStatus, StopReason
from worker.runtime.held_units import HeldUnit

RETRY_S = 0.5
PUT_WAIT_S = 0.2  # how soon a full queue sees that its unit has to stop
FULL_WAIT_S = 1.0  # for room in a full queue, from when a unit is to be given back
# Of one write. Redis does nothing else meanwhile (some 10 ms for 4 MiB), and takes no value above proto-max-bulk-len
# (512 MiB) nor command above client-query-buffer-limit (1 GiB), which 200 records with many logprobs can exceed.
MAX_BATCH_BYTES = 4 * 1024 * 1024
MAX_QUEUED_BYTES = 64 * 1024 * 1024  # of records and resume states that wait: a record may be of 23 MB (embeddings)
# Redis closes the connection without an answer on a value that is too large for it. A record larger than a batch is
# taken for one after so many writes that ended so, each with the client's own six retries, while Redis is well.
OVERSIZE_TRIES = 3

Written = PromptRecord | PromptResumeState
Item = TypeVar("Item", bound=Written)

logger = logging.getLogger(__name__)

Together = tuple[HeldUnit, Sequence[Written]]

_REFUSED = Failure.of_server("The request was executed, but its result could not be stored.", code="result_refused")


class ResultWriter:
    """Writes records to Redis, each unit's together, as fast as Redis takes them; never waits to fill a batch.

    Resume states of unfinished prompts go behind the records of their batch and are tried once: if Redis does not take
    one, a later one makes up for it, or the prompt begins again.

    While Redis is away it keeps trying records, and its full queue holds the shards back. A record that Redis refuses
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
        self._items = ItemQueue(10 * batch_size, MAX_QUEUED_BYTES)

    @property
    def waiting(self) -> tuple[int, int]:
        """How many records and resume states wait for Redis, and their bytes."""
        return self._items.waiting

    def offer(self, held: HeldUnit, resume_state: PromptResumeState) -> bool:
        """Queue a resume state; False, and it is dropped, if a tenth of the queue waits, or it is full."""
        if self._items.qsize() >= self._batch_size:
            return False
        held.add_unwritten(1)
        try:
            self._items.put_nowait((held, [resume_state]))
        except queue.Full:
            held.add_unwritten(-1)
            return False
        return True

    def put(self, held: HeldUnit, items: Iterable[Written]) -> bool:
        """Queue a unit's records or last resume states, taken one by one; waits while the queue is full.

        False if the rest was dropped: the unit is lost, or is to be given back and there was no room for a while.
        """
        return all(self._put(held, together) for together in _batches(items, self._batch_size))

    def _put(self, held: HeldUnit, items: Sequence[Written]) -> bool:
        held.add_unwritten(len(items))
        while not held.is_lost:
            try:
                self._items.put((held, items), timeout=PUT_WAIT_S)
            except queue.Full:
                if held.released_for_s < FULL_WAIT_S:
                    continue
                break
            return True
        held.add_unwritten(-len(items))
        return False

    def run(self, stopping: threading.Event) -> None:
        """Write until told to stop and the queue is empty."""
        while not (stopping.is_set() and self._items.empty()):
            for held, items in self._next_batch():
                with bound_contextvars(**held.log_fields):
                    self._write_items(held, items, stopping)
                held.add_unwritten(-len(items))

    def _next_batch(self) -> list[tuple[HeldUnit, list[Written]]]:
        by_unit: dict[int, tuple[HeldUnit, list[Written]]] = {}
        num_items = num_bytes = 0
        while num_items < self._batch_size and num_bytes < MAX_BATCH_BYTES:
            try:
                held, items = self._items.get(block=num_items == 0, timeout=PUT_WAIT_S)
            except queue.Empty:
                break
            by_unit.setdefault(id(held), (held, []))[1].extend(items)
            num_items += len(items)
            num_bytes += sum(item.num_bytes for item in items)
        return list(by_unit.values())

    def _write_items(self, held: HeldUnit, items: Sequence[Written], stopping: threading.Event) -> None:
        records = [item for item in items if isinstance(item, PromptRecord)]
        for batch in _batches(records, self._batch_size):
            self._write(held, batch, stopping)
        # After the records: Redis refuses the resume state of a prompt that has a record.
        newest = {item.index: item for item in items if isinstance(item, PromptResumeState)}
        for resume_states in _batches(list(newest.values()), self._batch_size):
            self._write_resume_states(held, resume_states)

    def _write(self, held: HeldUnit, records: Sequence[PromptRecord], stopping: threading.Event) -> None:
        num_tries = 0
        while not held.is_lost:
            num_tries += 1
            began_s = time.monotonic()
            try:
                at_end = held.stop_reason is not None and held.stop_reason.closing_mode is not None
                status, mode = self._leases.put(held.claim, records, at_end=at_end)
            except redis.RedisError as error:
                logger.warning("could not write %d records: %s", len(records), error)
                if self._is_refused(records, error, num_tries):
                    self._write_refused(held, records, stopping)
                    return
                if stopping.is_set():
                    return  # the unit is given back or its lease runs out; these prompts run again
                time.sleep(RETRY_S)
                continue
            held.hear(status, mode)
            held.span.add_write(records, began_s)
            if status is PutStatus.JOB_DONE:
                logger.info("job finished")
            return

    def _write_resume_states(self, held: HeldUnit, resume_states: Sequence[PromptResumeState]) -> None:
        if held.is_lost:
            return
        try:
            is_ours = self._leases.put_resume_states(held.claim, resume_states)
        except redis.RedisError as error:
            logger.warning("could not keep %d resume states: %s", len(resume_states), error)
            return
        if not is_ours and not held.is_written:
            held.stop(StopReason.FENCED)

    def _is_refused(self, records: Sequence[PromptRecord], error: redis.RedisError, num_tries: int) -> bool:
        """Whether it is no use to try these records again."""
        is_oversize = len(records) == 1 and records[0].num_bytes > MAX_BATCH_BYTES
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
            # Not because of the record, then: the job's keys are broken. An attempt, or it would come round for ever.
            logger.error("Redis takes no record of it: the unit is given up")
            with suppress(redis.RedisError):
                self._leases.release(held.claim, count_attempt=True)
            held.stop(StopReason.FENCED)
            return
        logger.error("a record was refused and is replaced by an error", extra={"index": records[0].index})
        self._write(held, [replacement], stopping)


def _batches(items: Iterable[Item], batch_size: int) -> Iterator[list[Item]]:
    """The items in lists of at most `batch_size` items and MAX_BATCH_BYTES, or of one item."""
    batch: list[Item] = []
    num_bytes = 0
    for item in items:
        if batch and (len(batch) == batch_size or num_bytes + item.num_bytes > MAX_BATCH_BYTES):
            yield batch
            batch, num_bytes = [], 0
        batch.append(item)
        num_bytes += item.num_bytes
    if batch:
        yield batch


class ItemQueue(queue.Queue[Together]):
    """A queue of groups of items; takes more while fewer than `max_items`, of less than `max_bytes`, wait.

    Its size is the number of items, or `max_items` if their bytes fill it. The methods below are those that queue.Queue
    lets subclasses replace; it calls them under its lock.
    """

    def __init__(self, max_items: int, max_bytes: int) -> None:
        super().__init__(max_items)
        self._max_bytes = max_bytes

    @property
    def waiting(self) -> tuple[int, int]:
        """How many items wait, and their bytes."""
        return self._num_items, self._num_bytes

    def _init(self, maxsize: int) -> None:
        self._waiting: deque[Together] = deque()
        self._num_items = self._num_bytes = 0

    def _qsize(self) -> int:
        return self._num_items if self._num_bytes < self._max_bytes else max(self._num_items, self.maxsize)

    def _put(self, item: Together) -> None:
        self._waiting.append(item)
        self._num_items += len(item[1])
        self._num_bytes += _num_bytes(item)

    def _get(self) -> Together:
        item = self._waiting.popleft()
        self._num_items -= len(item[1])
        self._num_bytes -= _num_bytes(item)
        return item


def _num_bytes(together: Together) -> int:
    return sum(item.num_bytes for item in together[1])


def refused_record(claim: Claim, refused: PromptRecord) -> PromptRecord:
    """A small error record in place of `refused`, always the same; the tokens that it cost stay counted."""
    context = RecordContext(claim.ref.job_id, "", claim.created_s)
    record = error_record(_REFUSED, refused.index, json.loads(refused.record).get("custom_id"), context)
    return dataclasses.replace(refused, outcome=Outcome.ERROR, record=encode_record(record))
