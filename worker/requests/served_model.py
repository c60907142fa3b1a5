"""The model that answers a process's lines."""

from __future__ import annotations

from settings import ModelSettings
from worker.answers.answer_formats import AnswerFormats
from worker.records.record_context import RecordContext
from worker.requests.answer_reader import AnswerReader
from worker.requests.call_grammar import CallGrammar
from worker.requests.chat_prompts import ChatPrompts
from worker.requests.model_name import served_model_name
from worker.requests.prompt_echoes import PromptEchoes
from worker.requests.record_builder import RecordBuilder
from worker.requests.request_builder import RequestBuilder
from worker.requests.step_engine import StepEngine
from worker.requests.token_text import TokenText


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
