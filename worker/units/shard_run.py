"""One shard, from its lines to its records."""

from __future__ import annotations

import logging
import queue
from collections import deque

import redis

from engine.errors import EngineError
from engine.finish_reason import FinishReason
from engine.request import Request
from engine.request_output import RequestOutput
from worker.lines.line_error import LineError
from worker.lines.request_line import RequestLine
from worker.process.engine_thread import EngineThread
from worker.process.held_unit import HeldUnit
from worker.process.result_writer import ResultWriter
from worker.registry.prompt_record import PromptRecord
from worker.registry.stop_reason import StopReason
from worker.registry.unit_leases import UnitLeases
from worker.units.shard_prompts import ShardPrompts
from worker.units.unit_closer import UnitCloser

READ_AHEAD = 32  # lines of one read: at most 8 MiB with the default limits
FULL_ENGINE_WAIT_S = 0.05  # how soon room that another shard left in the engine is seen

logger = logging.getLogger(__name__)


class ShardRun:
    """Feeds a claimed shard's prompts to the engine and its records to the writer, on the thread that calls `run`."""

    def __init__(
        self,
        held: HeldUnit,
        prompts: ShardPrompts,
        *,
        leases: UnitLeases,
        engine: EngineThread,
        writer: ResultWriter,
        closer: UnitCloser,
    ) -> None:
        self._held = held
        self._claim = held.claim
        self._prompts = prompts
        self._leases = leases
        self._engine = engine
        self._writer = writer
        self._closer = closer
        self._unread = deque(held.claim.missing)
        self._ready: deque[tuple[RequestLine, Request]] = deque()  # built, waiting for room in the engine
        self._running: dict[str, RequestLine] = {}  # by request id
        self._unrecorded = dict.fromkeys(held.claim.missing)  # in order; a dict for its cheap removal
        self._events: queue.SimpleQueue[RequestOutput | None] = queue.SimpleQueue()  # None: look at `held`

    def run(self) -> None:
        """Run until every prompt has its record, or there is a reason to stop (`held.stop_reason`).

        What had finished by then is handed to the writer, unless the unit is somebody else's. Prompts of a job that
        was cancelled or expired have got their error records when this returns. Raises redis.RedisError when Redis
        cannot be had.
        """
        self._held.on_change(lambda: self._events.put(None))
        try:
            while self._held.stop_reason is None and not self._held.is_written:
                self._feed()
                self._take_events()
        finally:
            self._engine.abort(list(self._running))
        self._take_what_finished()
        mode = self._held.stop_reason.closing_mode if self._held.stop_reason else None
        if mode is not None and self._held.wait_flushed(until=StopReason.RELEASED):
            self._closer.close(self._claim, list(self._unrecorded), mode)

    def _feed(self) -> None:
        """Put requests into the engine until it has no room or the shard is all in."""
        while self._held.stop_reason is None and (self._ready or self._unread):
            if not self._ready:
                self._read()
            if not self._ready:
                return
            line, request = self._ready[0]
            if not self._engine.try_submit(request, self._events.put):
                return
            self._ready.popleft()
            self._running[request.request_id] = line
            if not self._events.empty():
                return  # outputs go out before more goes in

    def _read(self) -> None:
        indices = [self._unread.popleft() for _ in range(min(READ_AHEAD, len(self._unread)))]
        try:
            lines = self._leases.lines(self._claim.ref.job_id, indices)
        except redis.RedisError as error:
            # What is in the engine goes on meanwhile.
            logger.warning("could not read lines of %s, trying again: %s", self._claim.ref, error)
            self._unread.extendleft(reversed(indices))
            return
        for index, raw in zip(indices, lines, strict=True):
            self._build(index, raw)

    def _build(self, index: int, raw: bytes | None) -> None:
        try:
            line = self._prompts.parse(index, raw)
        except LineError as error:
            self._record(self._prompts.of_line_error(error))
            return
        try:
            self._ready.append((line, self._prompts.request(line)))
        except EngineError as error:
            self._record(self._prompts.of_engine_error(line, error))
        except Exception as error:  # a seam: what a template or tokeniser may raise over one prompt stays with it
            logger.exception("prompt %d of %s could not be prepared", index, self._claim.ref)
            self._record(self._prompts.of_unexpected(line, error))

    def _take_events(self) -> None:
        is_all_in = not (self._ready or self._unread)
        try:
            output = self._events.get(timeout=None if is_all_in else FULL_ENGINE_WAIT_S)
            while True:
                if output is not None and not self._finish(output):
                    return
                output = self._events.get_nowait()
        except queue.Empty:
            return

    def _take_what_finished(self) -> None:
        """Hand on outputs that came while there was already a reason to stop: nobody need run them again."""
        while self._held.stop_reason is not StopReason.FENCED:
            try:
                output = self._events.get_nowait()
            except queue.Empty:
                return
            if output is not None and not self._finish(output):
                return

    def _finish(self, output: RequestOutput) -> bool:
        """False if the writer takes nothing more."""
        line = self._running.pop(output.request_id, None)
        if line is None or any(c.finish_reason is FinishReason.CANCELLED for c in output.completions):
            return True  # aborted by us: whoever asked for that decides on the record
        return self._record(self._prompts.of_output(line, output))

    def _record(self, record: PromptRecord) -> bool:
        del self._unrecorded[record.index]
        return self._writer.put(self._held, record)
