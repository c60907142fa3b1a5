"""Runs the engine on the one thread that owns it; other threads hand it prompts and get outputs back."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from engine.errors import EngineFatal, InvalidRequest
from engine.request import AnyRequest, RequestOutput, ResumeState
from worker.lines.request_line import PrefixKey
from worker.requests.step_engine import StepEngine
from worker.runtime.counts import EngineMeter
from worker.runtime.window import AdmissionWindow, PromptFeed

OnSuspended = Callable[[Mapping[str, ResumeState]], None]

SUSPEND_POLL_S = 0.1
IDLE_LOOK_S = 1.0  # between looks while idle: work wakes the thread anyway, the looks show that it lives

logger = logging.getLogger(__name__)


class EngineThread:
    """Loads and steps the engine, which no other thread touches: those leave prompts and aborts here.

    Before each step the engine gets what the window takes from the feeds. Outputs and resume states go to the callbacks
    of their feed on this thread, so a callback may only put them somewhere.
    """

    def __init__(
        self,
        load: Callable[[], StepEngine],
        *,
        window: AdmissionWindow,
        on_failure: Callable[[BaseException], None],
        meter: EngineMeter | None = None,
    ) -> None:
        self._load = load
        self._window = window
        self._on_failure = on_failure  # called on this thread, once, when the engine broke
        self._changed = threading.Condition()
        self._aborts: list[str] = []
        self._suspensions: list[tuple[Sequence[str], OnSuspended]] = []
        self._open: dict[str, PromptFeed | None] = {}  # by request id; None: nobody waits for it any more
        self._engine: StepEngine | None = None
        self._load_error: BaseException | None = None
        self._has_failed = False
        self._stopping = False
        self.is_idle = True  # waits for requests
        self.num_steps = 0  # finished ones; the watchdog looks whether it moves
        self._step_began_at = 0.0  # time.monotonic()
        self._looked_at = 0.0  # time.monotonic(): for work, while idle
        self._meter = meter or EngineMeter()  # is told about each step, on this thread
        self._ready = threading.Event()
        # A daemon: a step that hangs on the device must not keep the process from exiting.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> StepEngine:
        """Load the engine and return it, for its tokeniser and limits. Raises what loading raised."""
        self._thread.start()
        self._ready.wait()
        if self._engine is None:
            raise self._load_error or EngineFatal("the engine did not load")
        return self._engine

    @property
    def stalled_for_s(self) -> float:
        """How long the step that runs has been running; 0 while idle."""
        return 0.0 if self.is_idle else time.monotonic() - self._step_began_at

    @property
    def idle_overdue_s(self) -> float:
        """While idle, how long past its time it has not looked for work; else 0."""
        return max(0.0, time.monotonic() - self._looked_at - IDLE_LOOK_S) if self.is_idle else 0.0

    @property
    def num_open_requests(self) -> int:
        """Requests given to the engine whose output has not come yet."""
        return len(self._open)

    @contextmanager
    def fed_by(self, feed: PromptFeed) -> Iterator[None]:
        """Take prompts from this feed within the block; those not taken by its end are forgotten."""
        with self._changed:
            self._window.join(feed)
        try:
            yield
        finally:
            with self._changed:
                self._window.leave(feed)

    def offer(self, feed: PromptFeed, prompts: Sequence[tuple[PrefixKey, AnyRequest]], *, is_last: bool) -> None:
        """Add the next prompts of a feed, see PromptFeed.offer."""
        with self._changed:
            feed.offer(prompts, is_last=is_last)
            self._changed.notify_all()

    def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests before the engine's next step, if they are in it, without a callback."""
        with self._changed:
            self._aborts += self._forget(request_ids)
            self._changed.notify_all()

    def suspend(self, request_ids: Sequence[str], is_given_up: Callable[[], bool]) -> Mapping[str, ResumeState]:
        """End requests before the next step; the resume states of those that had generated anything.

        Outputs of the running step reach their callbacks before this returns. If `is_given_up`, asked every 0.1 s, says
        so before the step has ended, the answer is empty, and the requests end when the step does.
        """
        answer: queue.SimpleQueue[Mapping[str, ResumeState]] = queue.SimpleQueue()
        with self._changed:
            if self._is_over():
                return {}
            self._suspensions.append((request_ids, answer.put))
            self._changed.notify_all()
        while True:
            try:
                return answer.get(timeout=SUSPEND_POLL_S)
            except queue.Empty:
                if is_given_up() or self._is_over():
                    return {}

    def stop(self, timeout_s: float) -> bool:
        """Stop after the current step and close the engine; False if it hangs."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            engine = self._load()
            self._meter.publish(engine.stats())
        except BaseException as error:  # a seam: start() raises it on the thread that asked
            self._load_error = error
            self._ready.set()
            return
        self._engine = engine
        self._ready.set()
        try:
            while self._wait_for_work(engine):
                self._take_requests(engine)
                self._step(engine)
        except Exception as error:  # a seam: after any error the engine's state cannot be trusted
            logger.exception("the engine broke")
            self._has_failed = True
            self._on_failure(error)
            return  # without closing the engine: after a fault of the device any call may hang
        engine.close()

    def _wait_for_work(self, engine: StepEngine) -> bool:
        with self._changed:
            while not self._stopping and not (self._is_called() or engine.has_unfinished()):
                self._looked_at = time.monotonic()  # before is_idle, which other threads read first
                self.is_idle = True
                self._changed.wait(IDLE_LOOK_S)
            self._step_began_at = time.monotonic()  # before is_idle, which other threads read first
            self.is_idle = False
            return not self._stopping

    def _is_over(self) -> bool:
        return self._has_failed or self._stopping

    def _is_called(self) -> bool:
        return bool(self._window.has_waiting or self._aborts or self._suspensions)

    def _take_requests(self, engine: StepEngine) -> None:
        with self._changed:
            additions = self._window.take()
            self._open.update((request.request_id, feed) for request, feed in additions)
            aborts, self._aborts = self._aborts, []
            suspensions, self._suspensions = self._suspensions, []
        for request, _ in additions:
            try:
                engine.add_request(request)
            except InvalidRequest as error:
                self._deliver([RequestOutput(request.request_id, request.num_prompt_tokens, 0, (), error)])
        for request_ids, on_suspended in suspensions:
            taken = {request_id: engine.resume_state(request_id) for request_id in request_ids}
            on_suspended({request_id: state for request_id, state in taken.items() if state is not None})
            with self._changed:
                aborts += self._forget(request_ids)
        for request_id in aborts:
            engine.abort(request_id)

    def _forget(self, request_ids: Sequence[str]) -> list[str]:
        """Drop the callbacks of these requests and return those that are open. Call under the lock."""
        open_ids = [request_id for request_id in request_ids if request_id in self._open]
        self._open.update(dict.fromkeys(open_ids))
        return open_ids

    def _step(self, engine: StepEngine) -> None:
        if not engine.has_unfinished():
            return
        began_at = time.perf_counter()
        outputs = engine.step()
        self._meter.step(time.perf_counter() - began_at, engine.step_size)
        self.num_steps += 1
        self._deliver(outputs)
        if self._meter.is_due or not engine.has_unfinished():
            self._meter.publish(engine.stats())
        for request_id, resume_state in engine.due_resume_states().items():
            feed = self._open[request_id]
            if feed is not None:
                feed.on_resume_state(request_id, resume_state)

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Hand outputs on, those of one feed together, as a lock and a wake-up for each would cost more than it."""
        by_feed: dict[PromptFeed, list[RequestOutput]] = {}
        with self._changed:
            for output in outputs:
                if output.request_id not in self._open:
                    raise EngineFatal(f"the engine returned {output.request_id!r}, which is not open")
                feed = self._open.pop(output.request_id)
                self._window.end(output.request_id)
                if feed is not None:
                    by_feed.setdefault(feed, []).append(output)
        for feed, ended in by_feed.items():
            feed.on_outputs(ended)
