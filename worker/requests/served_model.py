"""Holds the model that answers a process's lines: what builds its requests and what writes its records."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from engine.checkpoint.files import model_directory
from engine.errors import EngineError, EngineFatal, EngineUnavailable, InvalidRequest
from engine.request import RequestOutput
from engine.text.tokenizer import Tokenizer
from settings import ModelSettings
from worker.lines.bodies import CompletionBody
from worker.lines.chat import ChatBody
from worker.lines.errors import LineError
from worker.lines.request_line import RequestLine
from worker.records.answers import AnswerFormats
from worker.records.failure import Failure, Unfinished, error_record, line_error_record, unfinished_record
from worker.records.record import RecordContext
from worker.records.success import EchoedPrompt, TokenSpelling, success_record
from worker.requests.answers import AnswerReader, TokenText
from worker.requests.builder import RequestBuilder
from worker.requests.call_grammar import CallGrammar
from worker.requests.chat_prompts import ChatPrompts
from worker.requests.step_engine import StepEngine

UNNAMED = "millrace"

logger = logging.getLogger(__name__)


class ServedModel:
    """One engine's model on both sides: lines to its requests, its outputs to records. Made once."""

    def __init__(self, engine: StepEngine, settings: ModelSettings) -> None:
        """Raises SettingsError for a model.path that is not under model.root."""
        formats = AnswerFormats(settings.tool_call_format, settings.reasoning_format)
        prompts = ChatPrompts(engine.tokenizer.chat_template, formats)
        token_text = TokenText(engine.tokenizer, prompts.formats.marks)
        self._name = served_model_name(settings)
        self._tokenizer = engine.tokenizer
        self._answers = AnswerReader(prompts, token_text)
        self._echoes = PromptEchoes(engine.tokenizer)
        self.requests = RequestBuilder(
            engine, prompts, CallGrammar(prompts, token_text.special_marks), model_name=self._name
        )

    def records(self, job_id: str, *, created_s: int) -> RecordBuilder:
        """The records of one job; `created_s`: its Unix time."""
        context = RecordContext(job_id, self._name, created_s)
        return RecordBuilder(self._tokenizer, context, self._answers, self._echoes)


def served_model_name(model: ModelSettings) -> str:
    """The name that requests may give and results carry: `model.name`, else the checkpoint directory's name.

    Raises SettingsError for a path that is not under model.root.
    """
    if model.name is not None:
        return model.name
    if model.path is None:
        return UNNAMED
    return model_directory(model).resolve().name or UNNAMED


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


class PromptEchoes:
    """Makes what `echo` asks for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def of(self, body: CompletionBody, output: RequestOutput) -> EchoedPrompt | None:
        """The prompt of `body` with what `output` says of its tokens; None where it is not to be echoed.

        A prompt of token ids is decoded as generated tokens are: without special tokens.
        """
        if not body.echo:
            return None
        text = body.prompt if isinstance(body.prompt, str) else self._tokenizer.decode(body.prompt)
        entries = output.prompt_logprobs
        if entries is None:
            return EchoedPrompt(text)
        return EchoedPrompt(text, entries.token_ids, tuple(self._offsets(text, entries.token_ids)), entries)

    def _offsets(self, text: str, token_ids: Sequence[int]) -> Iterator[int]:
        """Where each token begins in the text as the tokens spell it, which is the line's own text unless the tokenizer
        normalises it. Tokens of one character begin together; special tokens take room only where the text has them.
        """
        detokenizer = self._tokenizer.new_detokenizer()
        end = 0
        for token_id in token_ids:
            yield min(end, len(text))
            if token_id not in self._tokenizer.special_token_ids:
                end += len(detokenizer.append(token_id))
                continue
            mark = self._tokenizer.token_text(token_id)
            if text.startswith(mark, end):
                end += len(mark)
