"""Turns the lines of jobs into requests to one model, and the model's outputs into records."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from engine.checkpoint.files import model_directory
from engine.errors import EngineError, EngineFatal, EngineUnavailable, InvalidRequest
from engine.request import AnyRequest, RequestOutput
from engine.text.tokenizer import Tokenizer
from settings import ModelSettings
from worker.lines.bodies import CompletionBody
from worker.lines.chat import ChatBody
from worker.lines.errors import LineError
from worker.lines.request_line import RequestLine
from worker.lines.responses import ResponsesChat, responses_name
from worker.records.answers import AnswerFormats
from worker.records.failure import (
    Failure,
    Unfinished,
    error_record,
    line_error_record,
    too_large_record,
    unfinished_record,
)
from worker.records.record import RecordContext
from worker.records.success import EchoedPrompt, success_record, token_offsets
from worker.requests.answers import AnswerReader, TokenText
from worker.requests.builder import RequestBuilder
from worker.requests.call_grammar import CallGrammar
from worker.requests.chat_prompts import ChatPrompts
from worker.requests.step_engine import StepEngine

UNNAMED = "millrace"

Prepared = tuple[RequestLine, AnyRequest]
Record = dict[str, object]

logger = logging.getLogger(__name__)


class ServedModel:
    """The model that answers a process's lines: what builds its requests and reads its answers. Made once."""

    def __init__(self, engine: StepEngine, settings: ModelSettings) -> None:
        """Raises SettingsError for a model.path that is not under model.root."""
        formats = AnswerFormats(settings.tool_call_format, settings.reasoning_format)
        prompts = ChatPrompts(engine.tokenizer.chat_template, formats)
        token_text = TokenText(engine.tokenizer, prompts.formats.marks)
        self._name = served_model_name(settings)
        self._labels = () if engine.classifier is None else engine.classifier.labels
        self.tokenizer = engine.tokenizer
        self.answers = AnswerReader(prompts, token_text)
        self.requests = RequestBuilder(
            engine, prompts, CallGrammar(prompts, token_text.special_marks), names=served_names(settings)
        )

    def job(
        self, job_id: str, *, created_s: int, tenant: str = "", priority: int = 0, is_resolved: bool = False
    ) -> ServedJob:
        """The requests and records of one job; `created_s`: its Unix time.

        `is_resolved`: its lines were found to mean this model, whatever they name.
        """
        context = RecordContext(job_id, self._name, created_s, self._labels)
        return ServedJob(self, context, tenant, priority, is_resolved=is_resolved)


def served_model_name(model: ModelSettings) -> str:
    """The name that requests may give and results carry: `model.name`, else the checkpoint directory's name.

    Raises SettingsError for a path that is not under model.root.
    """
    if model.name is not None:
        return model.name
    if model.path is None:
        return UNNAMED
    return model_directory(model).resolve().name or UNNAMED


def served_names(model: ModelSettings) -> tuple[str, ...]:
    """The names that requests may give: the model's own, then its aliases, `*` among them. Raises SettingsError."""
    return (served_model_name(model), *model.alias_names)


@dataclass(frozen=True, slots=True)
class Unrunnable:
    """The record of a line that cannot be run."""

    index: int  # of the line
    record: Record


class ServedJob:
    """Translates for one job: its lines to requests, and the engine's outputs and errors to records."""

    def __init__(
        self, model: ServedModel, context: RecordContext, tenant: str, priority: int, *, is_resolved: bool
    ) -> None:
        self._model = model
        self._context = context
        self._build_all = partial(
            model.requests.build_all,
            created_s=context.created_s,
            tenant=tenant,
            priority=priority,
            is_resolved=is_resolved,
        )

    def prepare(
        self, lines: Sequence[RequestLine | LineError], request_id: Callable[[RequestLine], str]
    ) -> list[Prepared | Unrunnable]:
        """For each line what to run, or the record that says why not. Many together are cheaper than one by one."""
        good = [(line, request_id(line)) for line in lines if isinstance(line, RequestLine)]
        built = iter(self._build_all(good))
        return [
            Unrunnable(line.index, line_error_record(line, self._context))
            if isinstance(line, LineError)
            else self._prepared(line, next(built))
            for line in lines
        ]

    def _prepared(self, line: RequestLine, request: AnyRequest | Exception) -> Prepared | Unrunnable:
        if not isinstance(request, Exception):
            return line, request
        if isinstance(request, EngineError):
            return Unrunnable(line.index, self.of_error(line, request))
        fields = {"job_id": self._context.job_id, "index": line.index}
        logger.error("a request could not be prepared", extra=fields, exc_info=request)
        error = EngineFatal(f"preparing the request failed ({type(request).__name__})")
        return Unrunnable(line.index, self.of_error(line, error))

    def of_output(self, line: RequestLine, output: RequestOutput) -> tuple[Record, int]:
        """The record of `line`, whatever its request ended in, and how many of its tokens were reasoning."""
        if output.error is not None:
            return self.of_error(line, output.error), 0
        if output.was_aborted:
            return unfinished_record(Unfinished.CANCELLED, line.index, line.custom_id, self._context), 0
        body = line.body
        answers = self._model.answers.read(body, output.completions) if isinstance(body, ChatBody) else []
        tokenizer = self._model.tokenizer
        echo = echoed_prompt(body, output, tokenizer) if isinstance(body, CompletionBody) and body.echo else None
        record = success_record(line, output, tokenizer, self._context, answers, echo)
        return record, sum(answer.num_reasoning_tokens or 0 for answer in answers)

    def of_too_large(self, line: RequestLine, num_bytes: int, limit: int) -> Record:
        """The record of `line` in place of one of `num_bytes`, more than the limit."""
        return too_large_record(line, num_bytes, limit, self._context)

    def of_error(self, line: RequestLine, error: EngineError) -> Record:
        """The record of `line` when the engine raised `error`."""
        failure = _failure(error)
        if isinstance(line.body, ResponsesChat):
            failure = failure.renamed(responses_name)
        return error_record(failure, line.index, line.custom_id, self._context)


def _failure(error: EngineError) -> Failure:
    if isinstance(error, InvalidRequest):
        return Failure.of_request(str(error), code=error.code, param=error.param)
    if isinstance(error, EngineUnavailable):
        return Failure.of_server(str(error), code="engine_unavailable", may_pass=True)
    return Failure.of_server(str(error))


def echoed_prompt(body: CompletionBody, output: RequestOutput, tokenizer: Tokenizer) -> EchoedPrompt:
    """The prompt of `body` as `echo` asks for it, with what `output` says of its tokens.

    A prompt of token ids is decoded as generated tokens are: without special tokens.
    """
    text = body.prompt if isinstance(body.prompt, str) else tokenizer.decode(body.prompt)
    entries = output.prompt_logprobs
    if entries is None:
        return EchoedPrompt(text)
    return EchoedPrompt(text, entries.token_ids, tuple(token_offsets(text, entries.token_ids, tokenizer)), entries)
