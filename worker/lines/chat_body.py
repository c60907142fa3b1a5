"""The body of a /v1/chat/completions request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, Strict, Tag, model_validator
from pydantic_core import PydanticCustomError

from worker.lines.bounds import AT_LEAST_NONE, AT_LEAST_ONE
from worker.lines.chat_message import ChatMessage
from worker.lines.sampling_body import SamplingBody
from worker.lines.shorten import shorten
from worker.lines.tool import Tool
from worker.lines.tool_choice import ToolChoice

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


def _choice_kind(value: object) -> str:
    return "<named>" if isinstance(value, dict | ToolChoice) else "<mode>"


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
    parallel_tool_calls: bool = True  # false: of several calls the first is the answer's

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
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
            raise PydanticCustomError("invalid_value", "only with tools", value)
        if isinstance(self.tool_choice, ToolChoice) and self.tool_choice.function.name not in names:
            at = {"at": "tool_choice.function.name", "value": shorten(self.tool_choice.function.name)}
            raise PydanticCustomError("invalid_value", "the name of one of tools", at)

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives a position, None for no logprobs at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def max_output_tokens(self) -> int | None:
        """What the line asks for; None: as many as the context leaves."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """What the assistant may call: with tool_choice none it is not told of any tool."""
        return () if self.tool_choice == "none" else self.tools
