"""The body of a /v1/completions request."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BeforeValidator, model_validator
from pydantic_core import PydanticCustomError

from worker.lines.bounds import AT_LEAST_NONE, MAX_TOKENS, token_ids
from worker.lines.sampling_body import SamplingBody

DEFAULT_MAX_TOKENS = 16  # OpenAI's


def _prompt(value: object) -> str | tuple[int, ...]:
    if isinstance(value, str):
        if not value:
            raise PydanticCustomError("empty_prompt", "a prompt that is not empty")
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("invalid_type", "a string or a list of token ids")
    if not value:
        raise PydanticCustomError("empty_prompt", "a prompt that is not empty")
    return token_ids(value, accepted="a string or a list of token ids: one prompt a line")


class CompletionBody(SamplingBody):
    """A prompt, as text or as token ids, and how to continue it."""

    prompt: Annotated[str | tuple[int, ...], BeforeValidator(_prompt)]
    max_tokens: Annotated[int, AT_LEAST_NONE] | None = None  # 0 with echo: the prompt is scored and not continued
    logprobs: Annotated[int, AT_LEAST_NONE] | None = None  # alternatives a position; 0: the chosen token's only
    echo: bool = False  # the prompt comes back before what continues it, with log-probabilities where these are asked

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            accepted = f"a whole number, 1 to {MAX_TOKENS}; 0 only with echo true"
            raise PydanticCustomError("invalid_value", "{accepted}", {"accepted": accepted, "at": "max_tokens"})
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives a position, None for no logprobs at all."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the prompt's tokens."""
        return self.logprobs if self.echo else None

    @property
    def max_output_tokens(self) -> int | None:
        """What the line asks for; None: it does not say, and 16 or what the context leaves is meant."""
        return self.max_tokens
