"""One message of a conversation."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Discriminator, Strict, Tag, model_validator
from pydantic_core import PydanticCustomError

from worker.lines.content_part import ContentPart
from worker.lines.given_model import GivenModel
from worker.lines.tool_call import ToolCall

# The only role each of these fields may stand beside.
_ROLE_OF_FIELD = {
    "tool_calls": "assistant", "reasoning_content": "assistant", "refusal": "assistant", "tool_call_id": "tool",
}  # fmt: skip


def _content_kind(value: object) -> str | None:
    if isinstance(value, str):
        return "<text>"
    return "<parts>" if isinstance(value, list | tuple) else None


class ChatMessage(GivenModel):
    """A message: text or text parts, and what an assistant called or a tool answered.

    A `refusal` is what the assistant said, in the place of content. `audio`, `function_call` and `annotations` stand in
    messages that OpenAI returns; only their empty values are accepted back.
    """

    nullable: ClassVar[frozenset[str]] = frozenset({"content"})

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Annotated[
            Annotated[str, Tag("<text>")] | Annotated[tuple[ContentPart, ...], Strict(False), Tag("<parts>")],
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
    refusal: str | None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[tuple[()], Strict(False)] = ()

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        given = self.model_fields_set
        for field, role in _ROLE_OF_FIELD.items():
            if field in given and self.role != role:
                raise PydanticCustomError("invalid_value", f"only in a message of role {role}", {"at": field})
        self._has_its_content()
        return self

    def _has_its_content(self) -> None:
        if self.refusal is not None and self.content:
            raise PydanticCustomError("invalid_value", "only without content", {"at": "refusal"})
        if self.role != "assistant" and isinstance(self.content, tuple):
            for position, part in enumerate(self.content):
                if part.type == "refusal":
                    at = f"content[{position}].type"
                    accepted = {"at": at, "value": '"refusal"'}
                    raise PydanticCustomError("invalid_value", "'text', or a refusal of an assistant", accepted)
        may_be_silent = self.role == "assistant" and bool(self.tool_calls or self.reasoning_content or self.refusal)
        if self.content is None and not may_be_silent:
            raise PydanticCustomError("missing", "a string or a list of text parts", {"at": "content"})

    @property
    def text(self) -> str:
        """The content as one string; parts are joined by newlines, as vLLM joins them."""
        if isinstance(self.content, tuple):
            return "\n".join(part.said for part in self.content)
        return self.content or self.refusal or ""

    def for_template(self, *, keep_parts: bool = False) -> dict[str, object]:
        """The message as chat templates take it: tool arguments are objects, content is always there.

        Text parts are one string unless `keep_parts`.
        """
        message = self.as_given()
        if isinstance(self.content, tuple):
            message["content"] = [part.for_template() for part in self.content] if keep_parts else self.text
        elif self.content is None:  # templates add to it, which they cannot to nothing
            message["content"] = self.text
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message
