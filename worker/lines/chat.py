"""Checks the body of /v1/chat/completions: messages, their parts, tools and the calls of tools."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Strict, Tag, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from settings import LimitSettings
from worker.lines.bodies import SamplingBody
from worker.lines.fields import AT_LEAST_NONE, AT_LEAST_ONE, BodyModel, GivenModel
from worker.lines.strict_json import json_in_string, shorten

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]

# The only role each of these fields may stand beside.
_ROLE_OF_FIELD = {
    "tool_calls": "assistant", "reasoning_content": "assistant", "refusal": "assistant", "tool_call_id": "tool",
}  # fmt: skip

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def _choice_kind(value: object) -> str:
    return "<named>" if isinstance(value, dict | ToolChoice) else "<mode>"


class ContentPart(BodyModel):
    """Text, or an assistant's refusal: the content parts that a text model reads."""

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


def arguments_object(value: object, info: ValidationInfo[LimitSettings]) -> Mapping[str, object]:
    """OpenAI writes arguments as JSON in a string, empty where there are none; templates want the object."""
    if isinstance(value, str):
        value = json_in_string(value, info, "a JSON object in a string") if value else {}
    if not isinstance(value, dict):
        raise PydanticCustomError("invalid_type", "a JSON object in a string")
    return value


class CalledFunction(GivenModel):
    """Name and arguments of one call that the assistant made."""

    name: Annotated[str, Field(min_length=1)]
    arguments: Annotated[Mapping[str, object], BeforeValidator(arguments_object)]


class ToolCall(GivenModel):
    """One call that the assistant made in an earlier turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, object]:
        """The call as chat templates take it: arguments as an object, as vLLM passes them."""
        function = {**self.function.as_given(), "arguments": self.function.arguments}
        return {**self.as_given(), "function": function}


def _content_kind(value: object) -> str | None:
    if isinstance(value, str):
        return "<text>"
    return "<parts>" if isinstance(value, list | tuple) else None


class ChatMessage(GivenModel):
    """A message: text or text parts, and what an assistant called or a tool answered.

    A `refusal` stands in the place of content. `audio`, `function_call` and `annotations` are in messages that OpenAI
    returns; only their empty values are accepted back.
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
        """The message as chat templates take it: arguments are objects, content is there, in parts if `keep_parts`."""
        message = self.as_given()
        if isinstance(self.content, tuple):
            message["content"] = [part.for_template() for part in self.content] if keep_parts else self.text
        elif self.content is None:  # templates append to it
            message["content"] = self.text
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


def _function_name(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise PydanticCustomError("invalid_value", "1 to 64 letters, digits, _ and - (ASCII)")
    return name


FunctionName = Annotated[str, AfterValidator(_function_name)]  # OpenAI's rule


class ToolFunction(BodyModel):
    """What a function is called, what it is for and which arguments it takes."""

    name: FunctionName
    description: str | None = None
    parameters: Mapping[str, object] | None = None  # a JSON Schema of an object; none: no arguments
    strict: bool | None = None


class Tool(GivenModel):
    """A function on offer. Reaches the chat template as the line had it, key order included."""

    type: Literal["function"]
    function: ToolFunction


class NamedFunction(BodyModel):
    """A function that stands in `tools`."""

    name: FunctionName


class ToolChoice(BodyModel):
    """`tool_choice` as an object."""

    type: Literal["function"]
    function: NamedFunction


class ChatBody(SamplingBody):
    """A conversation and how to answer it."""

    messages: Annotated[tuple[ChatMessage, ...], Strict(False), Field(min_length=1)]
    max_completion_tokens: Annotated[int, AT_LEAST_ONE] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, AT_LEAST_NONE] | None = None
    chat_template_kwargs: Mapping[str, object] = Field(default_factory=dict)
    reasoning_effort: Effort | None = None
    tools: Annotated[tuple[Tool, ...], Strict(False)] = ()
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("<mode>")] | Annotated[ToolChoice, Tag("<named>")],
            Discriminator(_choice_kind),
        ]
        | None
    ) = None
    parallel_tool_calls: bool = True  # false: of several calls only the first is kept

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.top_logprobs and not self.logprobs:  # 0 asks for nothing
            raise PydanticCustomError("invalid_value", "only with logprobs true", {"at": "top_logprobs"})
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            at = "max_completion_tokens"
            raise PydanticCustomError("invalid_value", "the same number as max_tokens", {"at": at})
        self._has_consistent_tools()
        return self

    def _has_consistent_tools(self) -> None:
        names: set[str] = set()
        for position, tool in enumerate(self.tools):
            name = tool.function.name
            if name in names:
                at = {"at": f"tools[{position}].function.name", "value": shorten(name)}
                raise PydanticCustomError("invalid_value", "each name once", at)
            names.add(name)
        if self.tool_choice in (None, "none"):
            return
        if not names:
            value = {"at": "tool_choice", "value": shorten(self.model_dump()["tool_choice"])}
            raise PydanticCustomError("invalid_value", "only with at least one tool in tools", value)
        if isinstance(self.tool_choice, ToolChoice) and self.tool_choice.function.name not in names:
            at = {"at": "tool_choice.function.name", "value": shorten(self.tool_choice.function.name)}
            raise PydanticCustomError("invalid_value", "the name of one of tools", at)

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives a position, None for no logprobs at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def max_output_tokens(self) -> int | None:
        """Tokens the line asks for; None: as many as the context leaves."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """What the assistant may call: with tool_choice none it is told of no tool."""
        return () if self.tool_choice == "none" else self.tools
