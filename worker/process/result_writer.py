"""The thread that writes records."""

from __future__ import annotations

import logging
import queue
import threading
import time

import redis

from worker.process.held_unit import HeldUnit
from worker.registry.finished_prompt import FinishedPrompt
from worker.registry.put_status import PutStatus
from worker.registry.run_mode import RunMode
from worker.registry.stop_reason import StopReason
from worker.registry.unit_leases import UnitLeases

RETRY_S = 0.5
PUT_WAIT_S = 0.2  # how soon a full queue sees that its unit has to stop

logger = logging.getLogger(__name__)


class ResultWriter:
    """Writes records to Redis, each unit's together, as fast as Redis takes them; never waits to fill a batch.

    While Redis cannot be had it keeps trying, and its full queue holds the shards back.
    """

    def __init__(self, leases: UnitLeases, *, batch_size: int) -> None:
        self._leases = leases
        self._batch_size = batch_size
        self._records: queue.Queue[tuple[HeldUnit, FinishedPrompt]] = queue.Queue(maxsize=10 * batch_size)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="result-writer", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Write what is queued, then stop; False if that takes longer."""
        self._stopping.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def put(self, held: HeldUnit, record: FinishedPrompt) -> None:
        """Queue a record; waits while the queue is full, unless the unit has to be given up anyway."""
        held.add_unwritten(1)
        while (held.stop_reason or 0) < StopReason.RELEASED:
            try:
                self._records.put((held, record), timeout=PUT_WAIT_S)
            except queue.Full:
                continue
            return
        held.add_unwritten(-1)

    def _run(self) -> None:
        while not (self._stopping.is_set() and self._records.empty()):
            for held, records in self._next_batch():
                self._write(held, records)
                held.add_unwritten(-len(records))

    def _next_batch(self) -> list[tuple[HeldUnit, list[FinishedPrompt]]]:
        by_unit: dict[int, tuple[HeldUnit, list[FinishedPrompt]]] = {}
        for position in range(self._batch_size):
            try:
                held, record = self._records.get(block=position == 0, timeout=PUT_WAIT_S)
            except queue.Empty:
                break
            by_unit.setdefault(id(held), (held, []))[1].append(record)
        return list(by_unit.values())

    def _write(self, held: HeldUnit, records: list[FinishedPrompt]) -> None:
        while held.stop_reason is not StopReason.FENCED:
            try:
                status, mode = self._leases.put(held.claim, records)
            except redis.RedisError as error:
                logger.warning("could not write %d records of %s: %s", len(records), held.claim.ref, error)
                if self._stopping.is_set():
                    return  # the unit is given back or its lease runs out; these prompts run again
                time.sleep(RETRY_S)
                continue
            self._tell(held, status, mode)
            return

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
