"""Compilations of Triton kernels, as they happen on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from triton import knobs


@contextmanager
def counted_compilations() -> Iterator[list[str]]:
    """What is compiled within the block, each kernel with its launch; nothing is in the interpreter."""
    compiled: list[str] = []

    def note(*, repr: str, **_: Any) -> None:  # the name is Triton's
        compiled.append(repr)

    with mock.patch.object(knobs.runtime, "jit_post_compile_hook", note):
        yield compiled
