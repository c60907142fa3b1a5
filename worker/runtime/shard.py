"""Runs one shard, from its lines to its records, and resumes what another worker began."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import redis

from engine.request import AnyRequest, Request, RequestOutput, ResumeState
from settings import LimitSettings
from worker.lines.errors import LineError
from worker.lines.parse import parse_request_line
from worker.lines.request_line import PrefixKey, RequestLine, prefix_sort_key
from worker.records.record import encode_record, has_failed
from worker.registry.leases import Claim, PromptRecord, PromptResumeState, UnitLeases
from worker.registry.lifecycle import Outcome, StopReason
from worker.requests.served_model import Prepared, ServedModel, Unrunnable
from worker.runtime.engine_thread import EngineThread
from worker.runtime.held_units import HeldUnit, trace_request
from worker.runtime.resume_state import decode_resume_state, encode_resume_state
from worker.runtime.window import PromptFeed
from worker.runtime.writer import ResultWriter
from worker.unit_closer import UnitCloser

# Lines of one read: 32, at most 8 MiB with the default limits, and 32 MiB of resume states; then up to so many more as
# come to READ_BYTES if they are like those of the read before. Fewer and larger reads and steps spare an eighth of a
# worker's time where prompts are short.
READ_AHEAD, MAX_READ_AHEAD = 32, 128
READ_BYTES = 128 * 1024
TURN_WAIT_S = 0.5
READ_RETRY_S = 0.05  # between tries to read lines, each of which has waited for Redis in its own way
SUSPEND_TIMEOUT_S = 1.5  # for the step that runs, when the shard is given back; writing the records comes after it
# A larger resume state is not written: the prompt keeps its last smaller one. A token takes 4 to 7 bytes, so that only
# log-probabilities make one so large.
MAX_RESUME_STATE_BYTES = 1024 * 1024

logger = logging.getLogger(__name__)


class Turn:
    """Lets one of the shards' threads at a time claim a shard or make requests, those that claim first. Thread-safe.

    Sixteen threads that want the interpreter's lock let those wait that claim the next shard, or step the engine: of
    four busy workers on two cores each claim took 20 to 30 ms, and all of a worker's sixteen half a second.
    """

    def __init__(self) -> None:
        lock = threading.Lock()
        self._may_claim = threading.Condition(lock)
        self._may_make = threading.Condition(lock)
        self._num_claiming = 0  # that wait for their turn
        self._is_taken = False

    @contextmanager
    def to_claim(self, timeout_s: float) -> Iterator[bool]:
        """Have the turn before all that make requests. False after `timeout_s`."""
        with self._may_claim:
            self._num_claiming += 1
            has_turn = self._may_claim.wait_for(lambda: not self._is_taken, timeout_s)
            self._num_claiming -= 1
            self._is_taken = self._is_taken or has_turn
        try:
            yield has_turn
        finally:
            self._give(has_turn)

    @contextmanager
    def to_make_requests(self) -> Iterator[None]:
        """Have the turn while no thread waits to claim. Goes on without it where a claim waits for Redis."""
        with self._may_make:
            has_turn = self._may_make.wait_for(lambda: not (self._is_taken or self._num_claiming), TURN_WAIT_S)
            self._is_taken = self._is_taken or has_turn
        try:
            yield
        finally:
            self._give(has_turn)

    def _give(self, has_turn: bool) -> None:
        if has_turn:
            with self._may_claim:
                self._is_taken = False
                (self._may_claim if self._num_claiming else self._may_make).notify()


@dataclass(frozen=True, slots=True)
class ShardParts:
    """The parts of the worker that each run of a shard uses."""

    leases: UnitLeases
    engine: EngineThread
    writer: ResultWriter
    closer: UnitCloser
    turn: Turn = field(default_factory=Turn)


class ShardRunner:
    """Runs claimed shards, each on the thread that calls `run`, once it knows the served model."""

    def __init__(self, parts: ShardParts, *, limits: LimitSettings) -> None:
        self._parts = parts
        self._limits = limits
        self._served: ServedModel | None = None  # None: not loaded yet

    def serve(self, model: ServedModel) -> None:
        """Run shards on this model, which the engine has loaded."""
        self._served = model

    def run(self, held: HeldUnit) -> None:
        """Run one shard, see ShardRun.run."""
        if self._served is None:
            raise RuntimeError("a shard was taken before the engine was loaded")
        prompts = ShardPrompts(held.claim, self._served, limits=self._limits)
        ShardRun(held, prompts, self._parts).run()


class ShardRun:
    """Feeds a claimed shard's prompts to the engine and its records to the writer, on the thread that calls `run`."""

    def __init__(self, held: HeldUnit, prompts: ShardPrompts, parts: ShardParts) -> None:
        self._held = held
        self._claim = held.claim
        self._prompts = prompts
        self._leases = parts.leases
        self._engine = parts.engine
        self._writer = parts.writer
        self._closer = parts.closer
        self._turn = parts.turn
        self._unread = deque(held.claim.missing)
        self._read_size = READ_AHEAD  # lines of the next read
        self._running: dict[str, RequestLine] = {}  # by request id: offered, and then in the engine
        self._unrecorded = dict.fromkeys(held.claim.missing)  # in order; a dict for its cheap removal
        # None: look at `held` and at the resume states
        self._events: queue.SimpleQueue[list[RequestOutput] | None] = queue.SimpleQueue()
        # The newest of each request, by its id: while Redis is away, old ones would pile up by the gigabyte.
        self._resume_states: dict[str, ResumeState] = {}
        self._resume_states_lock = threading.Lock()
        self._feed = PromptFeed(
            self._claim.tenant,
            self._claim.priority,
            on_outputs=self._events.put,
            on_resume_state=self._put_resume_state,
            on_low=lambda: self._events.put(None),
        )

    def run(self) -> None:
        """Run until every prompt has its record, or there is a reason to stop (`held.stop_reason`).

        Records of what had finished by then go to the writer, unless the unit is lost; so do the resume states of a
        unit that is given back. If the job was cancelled or expired, the other prompts have their error records when
        this returns. Raises redis.RedisError when Redis cannot be had.
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
            self._held.close(self._closer, list(self._unrecorded), mode)

    def _read_ahead(self) -> None:
        """Offer prompts to the engine until enough of them wait there, or all of the shard's do."""
        while self._held.stop_reason is None and self._wants_lines():
            if not self._read() or not self._events.empty():
                return  # outputs go out before more goes in

    def _wants_lines(self) -> bool:
        return bool(self._unread) and self._feed.is_low

    def _read(self) -> bool:
        """Offer the next lines; False if Redis could not be had."""
        indices = [self._unread.popleft() for _ in range(min(self._read_size, len(self._unread)))]
        try:
            found = self._leases.lines_and_resume_states(self._claim.ref.job_id, indices, under=self._claim)
        except redis.RedisError as error:
            # The engine goes on with what it has.
            logger.warning("could not read lines, trying again: %s", error)
            self._unread.extendleft(reversed(indices))
            return False
        num_bytes = sum(len(value) for values in found for value in values if value is not None)
        self._read_size = min(max(READ_BYTES * len(indices) // max(num_bytes, 1), READ_AHEAD), MAX_READ_AHEAD)
        self._engine.offer(self._feed, self._prepare(dict(zip(indices, found, strict=True))), is_last=not self._unread)
        return True

    def _prepare(self, found: Mapping[int, tuple[bytes | None, bytes | None]]) -> list[tuple[PrefixKey, AnyRequest]]:
        """Requests to offer, from each index' line and resume state; what cannot be run gets its record."""
        prompts: list[tuple[PrefixKey, AnyRequest]] = []
        with self._turn.to_make_requests():
            prepared = self._prompts.prepare((index, raw) for index, (raw, _) in found.items())
        for item in prepared:
            if isinstance(item, PromptRecord):
                del self._unrecorded[item.index]
                self._writer.put(self._held, [item])
                continue
            line, request = item
            resume = self._decode(line.index, found[line.index][1])
            self._running[request.request_id] = line
            key = prefix_sort_key(line.prompt_key())
            if resume is not None and isinstance(request, Request):  # an embedding has no resume state
                request = replace(request, resume=resume)
            prompts.append((key, request))
        return prompts

    def _decode(self, index: int, resume_state: bytes | None) -> ResumeState | None:
        if resume_state is None:
            return None
        try:
            return decode_resume_state(resume_state)
        except ValueError as error:
            logger.warning("the resume state of a prompt is dropped: %s", error, extra={"index": index})
            return None

    def _put_resume_state(self, request_id: str, resume_state: ResumeState) -> None:
        with self._resume_states_lock:
            is_first = not self._resume_states
            self._resume_states[request_id] = resume_state
        if is_first:
            self._events.put(None)

    def _take_events(self) -> None:
        try:
            event = self._events.get(timeout=READ_RETRY_S if self._wants_lines() else None)
            while True:
                if event is None:
                    self._offer_resume_states()
                elif not self._finish(event):
                    return
                event = self._events.get_nowait()
        except queue.Empty:
            return

    def _suspend(self) -> Mapping[str, ResumeState]:
        """Take the shard's requests out of the engine with all that they have generated.

        A unit that is sent away keeps its lease until then: if the running step crashes, it is among the suspects.
        """
        return self._engine.suspend(list(self._running), lambda: self._held.released_for_s >= SUSPEND_TIMEOUT_S)

    def _offer_resume_states(self) -> None:
        with self._resume_states_lock:
            resume_states, self._resume_states = self._resume_states, {}
        for resume_state in self._encoded(resume_states):
            self._writer.offer(self._held, resume_state)

    def _encoded(self, resume_states: Mapping[str, ResumeState]) -> Iterator[PromptResumeState]:
        """The resume states of prompts that have not ended meanwhile."""
        for request_id, resume_state in resume_states.items():
            line = self._running.get(request_id)
            if line is None:
                continue
            encoded = encode_resume_state(resume_state)
            if len(encoded) <= MAX_RESUME_STATE_BYTES:
                yield PromptResumeState(line.index, encoded)

    def _take_what_finished(self) -> None:
        """Record outputs that came after the reason to stop, so that they do not run again."""
        while not self._held.is_lost:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                return
            if event is not None and not self._finish(event):
                return

    def _finish(self, outputs: Sequence[RequestOutput]) -> bool:
        """Hand the records of these outputs to the writer; False if it takes no more of this unit."""
        return self._writer.put(self._held, self._records(outputs))

    def _records(self, outputs: Sequence[RequestOutput]) -> Iterator[PromptRecord]:
        """Each is made when the writer takes it: those of one step may come to gigabytes."""
        for output in outputs:
            line = self._running.pop(output.request_id, None)
            if line is None or output.was_aborted:
                continue  # we aborted it, and its record comes from elsewhere
            del self._unrecorded[line.index]
            if self._held.span.wants(line.index):
                trace_request(self._held.span, line, output)
            yield self._prompts.of_output(line, output)


class ShardPrompts:
    """Parses, prepares and records the prompts of one claimed shard. Touches neither Redis nor the engine."""

    def __init__(self, claim: Claim, model: ServedModel, *, limits: LimitSettings) -> None:
        self._claim = claim
        self._limits = limits
        self._job = model.job(
            claim.ref.job_id,
            created_s=claim.created_s,
            tenant=claim.tenant,
            priority=claim.priority,
            is_resolved=claim.model != "",
        )

    def prepare(self, raw_lines: Iterable[tuple[int, bytes | None]]) -> list[Prepared | PromptRecord]:
        """For each (index, raw line): what to run, or the record that says why that cannot be run."""
        items = self._job.prepare([self._parsed(index, raw) for index, raw in raw_lines], self._request_id)
        return [
            PromptRecord(item.index, Outcome.ERROR, encode_record(item.record))
            if isinstance(item, Unrunnable)
            else item
            for item in items
        ]

    def of_output(self, line: RequestLine, output: RequestOutput) -> PromptRecord:
        """The record of a request that ended; its tokens are counted also where it is too large to be kept."""
        record, num_reasoning_tokens = self._job.of_output(line, output)
        encoded, max_bytes = encode_record(record), self._limits.max_record_bytes
        if len(encoded) > max_bytes and not has_failed(record):
            record = self._job.of_too_large(line, len(encoded), max_bytes)
            encoded = encode_record(record)
        return PromptRecord(
            line.index,
            Outcome.ERROR if has_failed(record) else Outcome.OK,
            encoded,
            prompt_tokens=output.num_prompt_tokens,
            cached_tokens=output.num_cached_tokens,
            output_tokens=sum(len(completion.token_ids) for completion in output.completions),
            resumed_tokens=output.num_resumed_tokens if output.completions else 0,
            reasoning_tokens=num_reasoning_tokens,
        )

    def _parsed(self, index: int, raw: bytes | None) -> RequestLine | LineError:
        try:
            return parse_request_line(raw, index, self._limits)
        except LineError as error:
            return error

    def _request_id(self, line: RequestLine) -> str:
        # With the claim's uuid, as this process may run a prompt again while the engine still ends the earlier try. The
        # number before it would not do: it begins again when the job is submitted again after a FLUSHALL.
        claim = self._claim
        return f"{claim.ref.job_id}/{line.index}/{claim.ref.unit}.{claim.token.rpartition(':')[2]}"
