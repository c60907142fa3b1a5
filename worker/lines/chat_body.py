"""The body of a /v1/chat/completions request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import Field, Strict, model_validator
from pydantic_core import PydanticCustomError

from worker.lines.bounds import AT_LEAST_NONE, AT_LEAST_ONE
from worker.lines.chat_message import ChatMessage
from worker.lines.sampling_body import SamplingBody


class ChatBody(SamplingBody):
    """A conversation and how to answer it."""

    messages: Annotated[tuple[ChatMessage, ...], Strict(False), Field(min_length=1)]
    max_completion_tokens: Annotated[int, AT_LEAST_ONE] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, AT_LEAST_NONE] | None = None
    chat_template_kwargs: Mapping[str, object] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("invalid_value", "only with logprobs true", {"at": "top_logprobs"})
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            at = "max_completion_tokens"
            raise PydanticCustomError("invalid_value", "the same number as max_tokens", {"at": at})
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives a position, None for no logprobs at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def max_output_tokens(self) -> int | None:
        """What the line asks for; None: as many as the context leaves."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
