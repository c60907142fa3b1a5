"""The parameters that say what an answer must look like."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from worker.lines.given_grammar import GivenGrammar
from worker.lines.grammar_texts import ChoicesText, SchemaText
from worker.lines.response_format import ResponseFormat
from worker.lines.service_fields import ServiceFields
from worker.lines.structured_outputs import StructuredOutputs

_NAMES = frozenset(
    {"response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}
)


class GrammarFields(ServiceFields):
    """OpenAI's `response_format`, and vLLM's names for the same and more, old and new. A line may have one of them."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaText | None = None
    guided_regex: Annotated[str, Field(min_length=1)] | None = None
    guided_choice: ChoicesText | None = None
    guided_grammar: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _has_one_grammar(self) -> Self:
        if not self.model_fields_set.isdisjoint(_NAMES):  # on few lines
            params = [given.param for given in self._grammars()]
            if len(params) > 1:
                accepted = f"a line without it, or without {params[0]}"
                raise PydanticCustomError("invalid_value", "{accepted}", {"accepted": accepted, "at": params[1]})
        return self

    @property
    def grammar(self) -> GivenGrammar | None:
        """What the answer is held to."""
        return next(iter(self._grammars()), None)

    def _grammars(self) -> list[GivenGrammar]:
        forms = (self.response_format, self.structured_outputs)
        given = [form.grammar for form in forms if form is not None]
        if self.guided_json is not None:
            given.append(GivenGrammar("json_schema", self.guided_json, "guided_json"))
        if self.guided_regex is not None:
            given.append(GivenGrammar("regex", self.guided_regex, "guided_regex"))
        if self.guided_choice is not None:
            given.append(GivenGrammar("choice", self.guided_choice, "guided_choice"))
        if self.guided_grammar is not None:
            given.append(GivenGrammar("lark", self.guided_grammar, "guided_grammar"))
        return [grammar for grammar in given if grammar is not None]
