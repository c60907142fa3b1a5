"""Encodes the texts of many lines together, and tells the one that is at fault from the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from engine.text.tokenizer import Tokenizer

P = ParamSpec("P")
T = TypeVar("T")


def encode_each(
    tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool
) -> Sequence[list[int] | Exception]:
    """The token ids of each text, or what encoding it raises.

    All together: a third of the time that one after the other takes, and other threads run meanwhile.
    """
    try:
        return tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
    except Exception:  # a seam: one text is at fault, or several; each on its own shows which
        return [attempt(tokenizer.encode, text, add_special_tokens=add_special_tokens) for text in texts]


def attempt(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | Exception:
    """What `call` returns, or raises."""
    try:
        return call(*args, **kwargs)
    except Exception as error:  # a seam: what a template or tokeniser may raise over one prompt stays with it
        return error
