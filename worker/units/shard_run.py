"""One shard, from its lines to its records."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import redis

from engine.request import AnyRequest, Request, RequestOutput, TokenCheckpoint
from worker.lines.prefix_order import PrefixKey, prefix_sort_key
from worker.lines.request_line import RequestLine
from worker.process.engine_thread import EngineThread
from worker.process.held_unit import HeldUnit
from worker.process.prompt_feed import PromptFeed
from worker.process.result_writer import ResultWriter
from worker.registry.prompt_checkpoint import PromptCheckpoint
from worker.registry.prompt_record import PromptRecord
from worker.registry.stop_reason import StopReason
from worker.registry.unit_leases import UnitLeases
from worker.units.checkpoint_json import decode_checkpoint, encode_checkpoint
from worker.units.shard_prompts import ShardPrompts
from worker.units.trace_request import trace_request
from worker.units.unit_closer import UnitCloser

READ_AHEAD = 32  # lines of one read: at most 8 MiB with the default limits, and 32 MiB of checkpoints
READ_RETRY_S = 0.05  # between tries to read lines, each of which has waited for Redis in its own way
SUSPEND_TIMEOUT_S = 1.5  # for the step that runs, when the shard is given back; records have theirs after that
# A larger one is not written, the prompt's last smaller one stays. A token takes 4 to 7 bytes: with logprobs it may be.
MAX_CHECKPOINT_BYTES = 1024 * 1024

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
        self._running: dict[str, RequestLine] = {}  # by request id: offered, and then in the engine
        self._unrecorded = dict.fromkeys(held.claim.missing)  # in order; a dict for its cheap removal
        # None: look at `held` and at the checkpoints
        self._events: queue.SimpleQueue[list[RequestOutput] | None] = queue.SimpleQueue()
        # The newest of each request, by its id: while Redis is away, old ones would pile up by the gigabyte.
        self._checkpoints: dict[str, TokenCheckpoint] = {}
        self._checkpoints_lock = threading.Lock()
        self._feed = PromptFeed(
            self._claim.tenant,
            self._claim.priority,
            on_outputs=self._events.put,
            on_checkpoint=self._put_checkpoint,
            on_low=lambda: self._events.put(None),
        )

    def run(self) -> None:
        """Run until every prompt has its record, or there is a reason to stop (`held.stop_reason`).

        What had finished by then is handed to the writer, unless the unit is somebody else's; of a unit that is given
        back also how far the others had come. Prompts of a job that was cancelled or expired have got their error
        records when this returns. Raises redis.RedisError when Redis cannot be had.
        """
        self._held.on_change(lambda: self._events.put(None))
        try:
            with self._engine.fed_by(self._feed):
                while self._held.stop_reason is None and not self._held.is_written:
                    self._read_ahead()
                    self._take_events()
            goes_back = self._held.stop_reason in (StopReason.SENT_AWAY, StopReason.RELEASED)
            suspended = self._suspend() if goes_back else {}
        finally:
            self._engine.abort(list(self._running))
        self._take_what_finished()
        if suspended:
            self._writer.put(self._held, self._encoded(suspended))
        mode = self._held.stop_reason.closing_mode if self._held.stop_reason else None
        if mode is not None and self._held.wait_flushed(until=StopReason.RELEASED):
            self._closer.close(self._claim, list(self._unrecorded), mode)

    def _read_ahead(self) -> None:
        """Offer prompts to the engine until enough of them wait there or the shard is all in."""
        while self._held.stop_reason is None and self._wants_lines():
            if not self._read() or not self._events.empty():
                return  # outputs go out before more goes in

    def _wants_lines(self) -> bool:
        return bool(self._unread) and self._feed.is_low

    def _read(self) -> bool:
        """Offer the next lines; False if Redis could not be had."""
        indices = [self._unread.popleft() for _ in range(min(READ_AHEAD, len(self._unread)))]
        try:
            found = self._leases.lines_and_checkpoints(self._claim.ref.job_id, indices)
        except redis.RedisError as error:
            # What is in the engine goes on meanwhile.
            logger.warning("could not read lines, trying again: %s", error)
            self._unread.extendleft(reversed(indices))
            return False
        self._engine.offer(self._feed, self._prepare(dict(zip(indices, found, strict=True))), is_last=not self._unread)
        return True

    def _prepare(self, found: Mapping[int, tuple[bytes | None, bytes | None]]) -> list[tuple[PrefixKey, AnyRequest]]:
        """Line and checkpoint by index, to requests to be offered and records of what cannot be run."""
        prompts: list[tuple[PrefixKey, AnyRequest]] = []
        for item in self._prompts.prepare((index, raw) for index, (raw, _) in found.items()):
            if isinstance(item, PromptRecord):
                del self._unrecorded[item.index]
                self._writer.put(self._held, [item])
                continue
            line, request = item
            resume = self._decode(line.index, found[line.index][1])
            self._running[request.request_id] = line
            key = prefix_sort_key(line.prompt_key())
            if resume is not None and isinstance(request, Request):  # an embedding has no half that could be kept
                request = replace(request, resume=resume)
            prompts.append((key, request))
        return prompts

    def _decode(self, index: int, checkpoint: bytes | None) -> TokenCheckpoint | None:
        if checkpoint is None:
            return None
        try:
            return decode_checkpoint(checkpoint)
        except ValueError as error:
            logger.warning("the checkpoint of a prompt is dropped: %s", error, extra={"index": index})
            return None

    def _put_checkpoint(self, request_id: str, checkpoint: TokenCheckpoint) -> None:
        with self._checkpoints_lock:
            is_first = not self._checkpoints
            self._checkpoints[request_id] = checkpoint
        if is_first:
            self._events.put(None)

    def _take_events(self) -> None:
        try:
            event = self._events.get(timeout=READ_RETRY_S if self._wants_lines() else None)
            while True:
                if event is None:
                    self._offer_checkpoints()
                elif not self._finish(event):
                    return
                event = self._events.get_nowait()
        except queue.Empty:
            return

    def _suspend(self) -> Mapping[str, TokenCheckpoint]:
        """Take the shard's requests out of the engine with all they have generated.

        A unit that is sent away keeps its lease until the engine has let go of it: should the step that runs crash,
        the unit is still among those to blame.
        """
        return self._engine.suspend(list(self._running), lambda: self._held.released_for_s >= SUSPEND_TIMEOUT_S)

    def _offer_checkpoints(self) -> None:
        with self._checkpoints_lock:
            checkpoints, self._checkpoints = self._checkpoints, {}
        for checkpoint in self._encoded(checkpoints):
            self._writer.offer(self._held, checkpoint)

    def _encoded(self, checkpoints: Mapping[str, TokenCheckpoint]) -> Iterator[PromptCheckpoint]:
        """How far prompts have come that have not ended meanwhile."""
        for request_id, checkpoint in checkpoints.items():
            line = self._running.get(request_id)
            if line is None:
                continue
            encoded = encode_checkpoint(checkpoint)
            if len(encoded) <= MAX_CHECKPOINT_BYTES:
                yield PromptCheckpoint(line.index, encoded)

    def _take_what_finished(self) -> None:
        """Hand on outputs that came while there was already a reason to stop: nobody need run them again."""
        while self._held.stop_reason is not StopReason.FENCED:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                return
            if event is not None and not self._finish(event):
                return

    def _finish(self, outputs: Sequence[RequestOutput]) -> bool:
        """False if the writer takes nothing more."""
        return self._writer.put(self._held, self._records(outputs))

    def _records(self, outputs: Sequence[RequestOutput]) -> Iterator[PromptRecord]:
        """Made as the writer takes them: those of one step may come to gigabytes."""
        for output in outputs:
            line = self._running.pop(output.request_id, None)
            if line is None or output.was_aborted:
                continue  # aborted by us: whoever asked for that decides on the record
            del self._unrecorded[line.index]
            if self._held.span.wants(line.index):
                trace_request(self._held.span, line, output)
            yield self._prompts.of_output(line, output)
