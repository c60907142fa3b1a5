"""A piece of a message's content."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from worker.lines.body_model import BodyModel


class ContentPart(BodyModel):
    """Text, or what an assistant said in refusing: the kinds of content part that a text model reads."""

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _has_its_text(self) -> Self:
        if getattr(self, self.type) is None:
            raise PydanticCustomError("missing", "a string", {"at": self.type})
        other = "text" if self.type == "refusal" else "refusal"
        if getattr(self, other) is not None:
            raise PydanticCustomError("invalid_value", "only in a part of that type", {"at": other})
        return self

    @property
    def said(self) -> str:
        """The text, of either kind."""
        return (self.text if self.type == "text" else self.refusal) or ""

    def for_template(self) -> dict[str, object]:
        """The part as chat templates take it: they know of text only."""
        return {"type": "text", "text": self.said}
