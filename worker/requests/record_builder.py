"""What the engine answered, as a result record."""

from __future__ import annotations

import logging

from engine.errors import EngineError, EngineFatal, EngineUnavailable, InvalidRequest
from engine.request import RequestOutput
from worker.lines.chat_body import ChatBody
from worker.lines.completion_body import CompletionBody
from worker.lines.line_error import LineError
from worker.lines.request_line import RequestLine
from worker.records.error_record import error_record, line_error_record
from worker.records.failure import Failure
from worker.records.record_context import RecordContext
from worker.records.success_record import success_record
from worker.records.token_spelling import TokenSpelling
from worker.records.unfinished import Unfinished
from worker.records.unfinished_record import unfinished_record
from worker.requests.answer_reader import AnswerReader
from worker.requests.prompt_echoes import PromptEchoes

logger = logging.getLogger(__name__)


class RecordBuilder:
    """Translates the engine's outputs and errors for one job."""

    def __init__(
        self, spelling: TokenSpelling, context: RecordContext, answers: AnswerReader, echoes: PromptEchoes
    ) -> None:
        self._spelling = spelling
        self._context = context
        self._answers = answers
        self._echoes = echoes

    def of_output(self, line: RequestLine, output: RequestOutput) -> tuple[dict[str, object], int]:
        """The record of `line`, whatever its request ended in, and how many of its tokens were reasoning."""
        if output.error is not None:
            return self.of_error(line, output.error), 0
        if output.was_aborted:
            return unfinished_record(Unfinished.CANCELLED, line.index, line.custom_id, self._context), 0
        body = line.body
        answers = self._answers.read(body, output.completions) if isinstance(body, ChatBody) else []
        echo = self._echoes.of(body, output) if isinstance(body, CompletionBody) else None
        record = success_record(line, output, self._spelling, self._context, answers, echo)
        return record, sum(answer.num_reasoning_tokens or 0 for answer in answers)

    def of_line_error(self, error: LineError) -> dict[str, object]:
        """The record of a line that is no request."""
        return line_error_record(error, self._context)

    def of_error(self, line: RequestLine, error: EngineError) -> dict[str, object]:
        """The record of `line` when the engine raised `error`."""
        return error_record(_failure(error), line.index, line.custom_id, self._context)

    def of_unbuilt(self, line: RequestLine, error: Exception) -> dict[str, object]:
        """The record of `line` when making its request raised `error`, which is logged where it is our own fault."""
        if isinstance(error, EngineError):
            return self.of_error(line, error)
        fields = {"job_id": self._context.job_id, "index": line.index}
        logger.error("a request could not be prepared", extra=fields, exc_info=error)
        return self.of_error(line, EngineFatal(f"preparing the request failed ({type(error).__name__})"))


def _failure(error: EngineError) -> Failure:
    if isinstance(error, InvalidRequest):
        return Failure.of_request(str(error), code=error.code, param=error.param)
    if isinstance(error, EngineUnavailable):
        return Failure.of_server(str(error), code="engine_unavailable", may_pass=True)
    return Failure.of_server(str(error))
