"""The body of a /v1/embeddings request."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from worker.lines.bounds import AT_LEAST_ONE, token_ids
from worker.lines.service_fields import ServiceFields

EmbeddingInput = str | tuple[int, ...]  # a text, or token ids

_SHAPES = "a string, a list of strings, a list of token ids or a list of lists of token ids"


def _inputs(value: object) -> tuple[EmbeddingInput, ...]:
    """OpenAI's four shapes as one: a tuple of inputs."""
    if isinstance(value, str):
        return (_text(value, None),)
    if not isinstance(value, list):
        raise PydanticCustomError("invalid_type", _SHAPES)
    if not value:
        raise PydanticCustomError("empty_prompt", "an input that is not empty")
    if isinstance(value[0], int):
        return (_token_ids(value, None),)
    if isinstance(value[0], str):
        return tuple(_text(item, position) for position, item in enumerate(value))
    return tuple(_token_ids(item, position) for position, item in enumerate(value))


def _text(value: object, position: int | None) -> str:
    if not isinstance(value, str):
        raise PydanticCustomError("invalid_type", "a string, as the first input", _at(position))
    if not value:
        raise PydanticCustomError("empty_prompt", "an input that is not empty", _at(position))
    return value


def _token_ids(value: object, position: int | None) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise PydanticCustomError("invalid_type", _SHAPES, _at(position))
    if not value:
        raise PydanticCustomError("empty_prompt", "an input that is not empty", _at(position))
    return token_ids(value, at=position)  # of a list of lists the list at fault is named


def _at(position: int | None) -> dict[str, object]:
    return {} if position is None else {"at": position}


class EmbeddingBody(ServiceFields):
    """Texts, or token ids, each of which becomes one vector of length 1.

    A text gets the special tokens that the model's tokenizer puts around it; token ids are taken as they are.
    """

    model: Annotated[str, Field(min_length=1)] | None = None
    input: Annotated[tuple[EmbeddingInput, ...], BeforeValidator(_inputs)]
    encoding_format: Literal["float", "base64"] = "float"  # base64: of the float32 numbers, little-endian
    dimensions: Annotated[int, AT_LEAST_ONE] | None = None  # only of models made for it: these are judged by the engine

    def param_of(self, index: int) -> str:
        """How error messages call an input."""
        return "input" if len(self.input) == 1 else f"input[{index}]"
