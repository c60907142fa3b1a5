"""One message of a conversation."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Discriminator, Strict, Tag, model_validator
from pydantic_core import PydanticCustomError

from worker.lines.given_model import GivenModel
from worker.lines.text_part import TextPart
from worker.lines.tool_call import ToolCall

# The only role each of these fields may stand beside.
_ROLE_OF_FIELD = {"tool_calls": "assistant", "reasoning_content": "assistant", "tool_call_id": "tool"}


def _content_kind(value: object) -> str | None:
    if isinstance(value, str):
        return "<text>"
    return "<parts>" if isinstance(value, list | tuple) else None


class ChatMessage(GivenModel):
    """A message: text or text parts, and what an assistant called or a tool answered.

    `refusal`, `audio`, `function_call` and `annotations` stand in every message that OpenAI returns; only
    their empty values are accepted back.
    """

    nullable: ClassVar[frozenset[str]] = frozenset({"content"})

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Annotated[
            Annotated[str, Tag("<text>")] | Annotated[tuple[TextPart, ...], Strict(False), Tag("<parts>")],
            Discriminator(
                _content_kind,
                custom_error_type="invalid_type",
                custom_error_message="a string or a list of text parts",
            ),
        ]
        | None
    ) = None
    name: str | None = None
    tool_calls: Annotated[tuple[ToolCall, ...], Strict(False)] = ()
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[tuple[()], Strict(False)] = ()

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        given = self.model_fields_set
        for field, role in _ROLE_OF_FIELD.items():
            if field in given and self.role != role:
                raise PydanticCustomError("invalid_value", f"only in a message of role {role}", {"at": field})
        may_be_silent = self.role == "assistant" and bool(self.tool_calls or self.reasoning_content)
        if self.content is None and not may_be_silent:
            raise PydanticCustomError("missing", "a string or a list of text parts", {"at": "content"})
        return self

    @property
    def text(self) -> str:
        """The content as one string; parts are joined by newlines, as vLLM joins them."""
        if isinstance(self.content, tuple):
            return "\n".join(part.text for part in self.content)
        return self.content or ""

    def for_template(self) -> dict[str, object]:
        """The message as chat templates take it: text content is one string, tool arguments are objects."""
        message = self.as_given()
        if isinstance(self.content, tuple):
            message["content"] = self.text
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message
