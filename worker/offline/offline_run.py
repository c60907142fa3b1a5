"""A file of request lines through an engine in this process: no Redis, no job."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from engine.any_request import AnyRequest
from engine.errors import EngineError, EngineFatal, InvalidRequest
from engine.request_output import RequestOutput
from worker.answers.answer_formats import AnswerFormats
from worker.lines.line_error import LineError
from worker.lines.request_line import RequestLine
from worker.offline.line_feed import LineFeed
from worker.offline.run_order import Line
from worker.offline.run_summary import RunSummary
from worker.records.encode_record import has_failed
from worker.records.error_record import line_error_record
from worker.records.record_context import RecordContext
from worker.requests.record_builder import RecordBuilder
from worker.requests.request_builder import RequestBuilder
from worker.requests.step_engine import StepEngine

JOB_ID = "run"  # stands in the record ids where a job's id would
# While requests run, a line that is not there yet is waited for no longer than this before the next step.
BUSY_WAIT_S = 0.001
IDLE_WAIT_S = 0.1  # how soon a request to stop is seen while the input is silent

logger = logging.getLogger(__name__)


class OfflineRun:
    """Keeps a bounded window of requests in the engine and writes each record the moment it exists."""

    def __init__(
        self,
        engine: StepEngine,
        *,
        model_name: str,
        window: int,
        write: Callable[[Mapping[str, object]], None],
        formats: AnswerFormats | None = None,
    ) -> None:
        context = RecordContext(JOB_ID, model_name, created_s=int(time.time()))
        self._engine = engine
        self._window = window  # requests in the engine at once: enough to order by prefix, not a whole file
        self._write_record = write
        self._context = context
        self._requests = RequestBuilder(
            engine.tokenizer,
            max_model_len=engine.max_model_len,
            model_name=model_name,
            formats=formats,
            generates=engine.generates,
        )
        self._records = RecordBuilder(engine.tokenizer, context, self._requests.answers, self._requests.echoes)
        self._running: dict[str, RequestLine] = {}
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
        while len(self._running) < self._window:
            line = feed.take(BUSY_WAIT_S if self._running else IDLE_WAIT_S)
            if line is None:
                return
            self._accept(line)

    def _accept(self, line: Line) -> None:
        if isinstance(line, LineError):
            self._record(line_error_record(line, self._context))
            return
        request = self._build(line)
        if request is None:
            return
        self._running[request.request_id] = line
        try:
            self._engine.add_request(request)
        except InvalidRequest as error:
            del self._running[request.request_id]
            self._record(self._records.of_error(line, error))

    def _build(self, line: RequestLine) -> AnyRequest | None:
        """The engine's request for `line`, or None once its error record is written."""
        try:
            return self._requests.build(line, str(line.index))
        except EngineError as error:
            self._record(self._records.of_error(line, error))
        except Exception as error:  # a seam: what a template or tokeniser may raise over one prompt stays with it
            logger.exception("line %d could not be prepared", line.index + 1)
            self._record(self._records.of_unexpected(line, error))
        return None

    def _finish(self, output: RequestOutput) -> None:
        line = self._running.pop(output.request_id, None)
        if line is None:
            raise EngineFatal(f"the engine returned {output.request_id!r}, which is not running")
        self._prompt_tokens += output.num_prompt_tokens
        self._cached_tokens += output.num_cached_tokens
        self._output_tokens += sum(len(completion.token_ids) for completion in output.completions)
        self._record(self._records.of_output(line, output))

    def _fail_running(self, error: EngineError) -> None:
        for line in self._running.values():
            self._record(self._records.of_error(line, error))
        self._running.clear()

    def _record(self, record: Mapping[str, object]) -> None:
        self._num_records += 1
        self._num_failed += has_failed(record)
        self._write_record(record)
