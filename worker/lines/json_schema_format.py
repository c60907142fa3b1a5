"""The schema of a response format."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from worker.lines.body_model import BodyModel
from worker.lines.grammar_texts import SchemaText


class JsonSchemaFormat(BodyModel):
    """A named JSON schema. Answers are held to all of it, whether `strict` is true or not."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None  # OpenAI shows it to the model; here the prompt says what it says
    schema_text: Annotated[SchemaText, Field(alias="schema")]
    strict: bool | None = None
