"""Work of which one part may fail alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def attempt(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | Exception:
    """What `call` returns, or raises."""
    try:
        return call(*args, **kwargs)
    except Exception as error:  # a seam: what a template or tokeniser may raise over one prompt stays with it
        return error
