"""OpenAI's `response_format`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from worker.lines.body_model import BodyModel
from worker.lines.given_grammar import GivenGrammar
from worker.lines.json_schema_format import JsonSchemaFormat


class ResponseFormat(BodyModel):
    """Text of any kind, a JSON object of any kind, or JSON that a schema describes."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise PydanticCustomError("missing", "an object", {"at": "json_schema"})
        if self.type != "json_schema" and self.json_schema is not None:
            at = {"at": "json_schema", "value": "set"}
            raise PydanticCustomError("invalid_value", "only with type json_schema", at)
        return self

    @property
    def grammar(self) -> GivenGrammar | None:
        """What the answer is held to; None for text."""
        if self.json_schema is not None:
            return GivenGrammar("json_schema", self.json_schema.schema_text, "response_format")
        return GivenGrammar("json_object", "", "response_format") if self.type == "json_object" else None
