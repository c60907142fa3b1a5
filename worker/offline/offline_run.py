"""A file of request lines through an engine in this process: no Redis, no job."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from engine.errors import EngineError, EngineFatal, InvalidRequest
from engine.request import AnyRequest, RequestOutput
from settings import ModelSettings
from worker.lines.line_error import LineError
from worker.lines.request_line import RequestLine
from worker.offline.line_feed import LineFeed
from worker.offline.run_order import Line
from worker.offline.run_summary import RunSummary
from worker.records.encode_record import has_failed
from worker.requests.request_window import request_room
from worker.requests.served_model import ServedModel
from worker.requests.step_engine import StepEngine

JOB_ID = "run"  # stands in the record ids where a job's id would
# While requests run, a line that is not there yet is waited for no longer than this before the next step.
BUSY_WAIT_S = 0.001
BUILT_TOGETHER = 32  # lines at most: their texts are tokenised together
IDLE_WAIT_S = 0.1  # how soon a request to stop is seen while the input is silent


class OfflineRun:
    """Keeps a bounded window of requests in the engine and writes each record the moment it exists."""

    def __init__(
        self,
        engine: StepEngine,
        model: ModelSettings,
        *,
        window: int,
        write: Callable[[Mapping[str, object]], None],
    ) -> None:
        """`model`: which one `engine` runs. Raises SettingsError for a model.path that is not under model.root."""
        served = ServedModel(engine, model)
        self._engine = engine
        self._window = window  # sequences in the engine at once: enough to order by prefix, not a whole file
        self._write_record = write
        self._requests = served.requests
        self._created_s = int(time.time())
        self._records = served.records(JOB_ID, created_s=self._created_s)
        self._built: deque[tuple[RequestLine, AnyRequest]] = deque()  # next to go into the engine
        self._room_taken = 0
        self._running: dict[str, tuple[RequestLine, int]] = {}  # with the room it takes
        self._num_records = self._num_failed = 0
        self._prompt_tokens = self._cached_tokens = self._output_tokens = 0
        self._started_s = time.monotonic()

    def run(self, feed: LineFeed, should_stop: Callable[[], bool], on_progress: Callable[[], None]) -> None:
        """Run every line of `feed`, or until `should_stop`; what is unfinished then gets no record.

        If the engine breaks, the requests in it get an error record each, the lines after them none, and EngineError
        is raised. Raises what reading the input raised.
        """
        try:
            while not should_stop():
                self._admit(feed)
                if self._engine.has_unfinished():
                    for output in self._engine.step():
                        self._finish(output)
                elif feed.ended:
                    return
                on_progress()
        except EngineError as error:
            self._fail_running(error)
            raise

    def summary(self, load_s: float) -> RunSummary:
        """The figures so far."""
        return RunSummary(
            load_s=load_s,
            elapsed_s=time.monotonic() - self._started_s,
            requests=self._num_records,
            failed=self._num_failed,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            output_tokens=self._output_tokens,
        )

    def _admit(self, feed: LineFeed) -> None:
        while self._room_taken < self._window:
            if self._built:
                self._add(*self._built.popleft())
                continue
            lines = feed.take(BUILT_TOGETHER, BUSY_WAIT_S if self._running else IDLE_WAIT_S)
            if not lines:
                return
            self._build(lines)

    def _build(self, lines: Sequence[Line]) -> None:
        parsed = [line for line in lines if isinstance(line, RequestLine)]
        for line in lines:
            if isinstance(line, LineError):
                self._record(self._records.of_line_error(line))
        built = self._requests.build_all([(line, str(line.index)) for line in parsed], created_s=self._created_s)
        for line, request in zip(parsed, built, strict=True):
            if isinstance(request, Exception):
                self._record(self._records.of_unbuilt(line, request))
            else:
                self._built.append((line, request))

    def _add(self, line: RequestLine, request: AnyRequest) -> None:
        room = request_room(request)
        self._running[request.request_id] = line, room
        self._room_taken += room
        try:
            self._engine.add_request(request)
        except InvalidRequest as error:
            self._record(self._records.of_error(self._take_out(request.request_id), error))

    def _take_out(self, request_id: str) -> RequestLine:
        line, room = self._running.pop(request_id)
        self._room_taken -= room
        return line

    def _finish(self, output: RequestOutput) -> None:
        if output.request_id not in self._running:
            raise EngineFatal(f"the engine returned {output.request_id!r}, which is not running")
        line = self._take_out(output.request_id)
        self._prompt_tokens += output.num_prompt_tokens
        self._cached_tokens += output.num_cached_tokens
        self._output_tokens += sum(len(completion.token_ids) for completion in output.completions)
        record, _ = self._records.of_output(line, output)
        self._record(record)

    def _fail_running(self, error: EngineError) -> None:
        for line, _ in self._running.values():
            self._record(self._records.of_error(line, error))
        self._running.clear()

    def _record(self, record: Mapping[str, object]) -> None:
        self._num_records += 1
        self._num_failed += has_failed(record)
        self._write_record(record)
