"""What the engine answered, as a result record."""

from __future__ import annotations

from engine.errors import EngineError, EngineFatal, EngineUnavailable, InvalidRequest
from engine.request_output import RequestOutput
from worker.answers.chat_answer import ChatAnswer
from worker.lines.chat_body import ChatBody
from worker.lines.completion_body import CompletionBody
from worker.lines.request_line import RequestLine
from worker.records.error_record import error_record
from worker.records.failure import Failure
from worker.records.record_context import RecordContext
from worker.records.success_record import success_record
from worker.records.token_spelling import TokenSpelling
from worker.records.unfinished import Unfinished
from worker.records.unfinished_record import unfinished_record
from worker.requests.answer_reader import AnswerReader
from worker.requests.prompt_echoes import PromptEchoes


class RecordBuilder:
    """Translates the engine's outputs and errors for one job."""

    def __init__(
        self, spelling: TokenSpelling, context: RecordContext, answers: AnswerReader, echoes: PromptEchoes
    ) -> None:
        self._spelling = spelling
        self._context = context
        self._answers = answers
        self._echoes = echoes

    def of_output(self, line: RequestLine, output: RequestOutput) -> dict[str, object]:
        """The record of `line`, whatever its request ended in."""
        if output.error is not None:
            return self.of_error(line, output.error)
        if output.was_aborted:
            return unfinished_record(Unfinished.CANCELLED, line.index, line.custom_id, self._context)
        answers: list[ChatAnswer] | None = None
        if isinstance(line.body, ChatBody):
            answers = [self._answers.read(line.body, completion) for completion in output.completions]
        echo = self._echoes.of(line.body, output) if isinstance(line.body, CompletionBody) else None
        return success_record(line, output, self._spelling, self._context, answers, echo)

    def of_error(self, line: RequestLine, error: EngineError) -> dict[str, object]:
        """The record of `line` when the engine, or the request builder before it, raised `error`."""
        return error_record(_failure(error), line.index, line.custom_id, self._context)

    def of_unexpected(self, line: RequestLine, error: Exception) -> dict[str, object]:
        """The record of `line` when our own code failed over it before it was a request; the details are in the log."""
        return self.of_error(line, EngineFatal(f"preparing the request failed ({type(error).__name__})"))


def _failure(error: EngineError) -> Failure:
    if isinstance(error, InvalidRequest):
        return Failure.of_request(str(error), code=error.code, param=error.param)
    if isinstance(error, EngineUnavailable):
        return Failure.of_server(str(error), code="engine_unavailable", may_pass=True)
    return Failure.of_server(str(error))
