"""The thread that owns the engine."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from engine.errors import EngineFatal, InvalidRequest
from engine.request import Request
from engine.request_output import RequestOutput
from worker.requests.step_engine import StepEngine

OnOutput = Callable[[RequestOutput], None]

logger = logging.getLogger(__name__)


class EngineThread:
    """Loads the engine, steps it, and is the only one to touch it. Other threads leave requests and aborts here.

    Outputs are handed to each request's own callback on this thread, so a callback may only put them somewhere.
    """

    def __init__(
        self, load: Callable[[], StepEngine], *, max_open_requests: int, on_failure: Callable[[BaseException], None]
    ) -> None:
        self._load = load
        self._max_open_requests = max_open_requests  # more stay with their shards: bounds memory
        self._on_failure = on_failure  # called on this thread, once, when the engine broke
        self._changed = threading.Condition()
        self._additions: list[Request] = []
        self._aborts: list[str] = []
        self._callbacks: dict[str, OnOutput] = {}
        self._engine: StepEngine | None = None
        self._load_error: BaseException | None = None
        self._has_failed = False
        self._stopping = False
        self._is_idle = True
        self._num_steps = 0
        self._step_began_at = 0.0  # time.monotonic()
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
    def num_steps(self) -> int:
        """Steps finished; a leaseholder watches it move."""
        return self._num_steps

    @property
    def is_idle(self) -> bool:
        """Whether it waits for requests."""
        return self._is_idle

    @property
    def stalled_for_s(self) -> float:
        """How long the step that runs has been running; 0 while idle."""
        return 0.0 if self._is_idle else time.monotonic() - self._step_began_at

    @property
    def num_open_requests(self) -> int:
        """Requests without their output."""
        return len(self._callbacks)

    def try_submit(self, request: Request, on_output: OnOutput) -> bool:
        """Queue a request; `on_output` gets its one output. False, and nothing queued, if there is no room now."""
        with self._changed:
            if self._has_failed or self._stopping or len(self._callbacks) >= self._max_open_requests:
                return False
            self._callbacks[request.request_id] = on_output
            self._additions.append(request)
            self._changed.notify_all()
            return True

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests before the next step; their callbacks are forgotten."""
        with self._changed:
            for request_id in request_ids:
                if self._callbacks.get(request_id) is not None:
                    self._callbacks[request_id] = _ignore
                    self._aborts.append(request_id)
            self._changed.notify_all()

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
        except Exception as error:  # a seam: whatever the engine raised, its state can be trusted no more
            logger.exception("the engine broke")
            self._has_failed = True
            self._on_failure(error)
        finally:
            engine.close()

    def _wait_for_work(self, engine: StepEngine) -> bool:
        with self._changed:
            while not self._stopping and not (self._additions or self._aborts or engine.has_unfinished()):
                self._is_idle = True
                self._changed.wait()
            self._step_began_at = time.monotonic()  # before _is_idle, which other threads read first
            self._is_idle = False
            return not self._stopping

    def _take_requests(self, engine: StepEngine) -> None:
        with self._changed:
            additions, self._additions = self._additions, []
            aborts, self._aborts = self._aborts, []
        for request in additions:
            try:
                engine.add_request(request)
            except InvalidRequest as error:
                self._deliver(RequestOutput(request.request_id, len(request.prompt_token_ids), 0, (), error))
        for request_id in aborts:
            engine.abort(request_id)

    def _step(self, engine: StepEngine) -> None:
        if not engine.has_unfinished():
            return
        outputs = engine.step()
        self._num_steps += 1
        for output in outputs:
            self._deliver(output)

    def _deliver(self, output: RequestOutput) -> None:
        with self._changed:
            callback = self._callbacks.pop(output.request_id, None)
        if callback is None:
            raise EngineFatal(f"the engine returned {output.request_id!r}, which is not open")
        callback(output)


def _ignore(_output: RequestOutput) -> None:
    """For the output of a request nobody waits for any more."""
