"""vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from worker.lines.body_model import BodyModel
from worker.lines.given_grammar import GivenGrammar, GivenKind
from worker.lines.grammar_texts import ChoicesText, SchemaText


class StructuredOutputs(BodyModel):
    """One of the forms that an answer can be held to."""

    schema_text: Annotated[SchemaText | None, Field(alias="json")] = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: ChoicesText | None = None
    grammar_text: Annotated[str | None, Field(alias="grammar", min_length=1)] = None
    json_object: bool | None = None  # false: not asked for

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if len(self._texts()) != 1:
            raise PydanticCustomError("invalid_value", "one of json, regex, choice, grammar and json_object")
        return self

    def _texts(self) -> list[tuple[GivenKind, str]]:
        texts: list[tuple[GivenKind, str | None]] = [
            ("json_schema", self.schema_text),
            ("regex", self.regex),
            ("choice", self.choice),
            ("lark", self.grammar_text),
            ("json_object", "" if self.json_object else None),
        ]
        return [(kind, text) for kind, text in texts if text is not None]

    @property
    def grammar(self) -> GivenGrammar:
        """What the answer is held to."""
        ((kind, text),) = self._texts()
        return GivenGrammar(kind, text, "structured_outputs")
