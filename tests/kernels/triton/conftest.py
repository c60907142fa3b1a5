"""Runs these tests in Triton's interpreter on any machine, or as they are on a GPU.

The interpreter is chosen when a kernel is decorated, so it needs a pytest run of its own:
`TRITON_INTERPRET=1 python -m pytest tests/kernels/triton`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache

import pytest
import torch
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

from tests.support.devices import GuardedMemory, interpreter_beside_numpy

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if IS_INTERPRETED or torch.cuda.is_available() else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests that need a GPU when they run in the interpreter, also on a machine with a GPU."""
    for item in items:
        if IS_INTERPRETED and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs Triton's kernels on an NVIDIA GPU"))


@pytest.fixture(scope="session", autouse=True)
def _language_patched_once() -> Iterator[None]:
    """The interpreter replaces the functions of Triton's language at every launch and every call of a device function,
    which takes 10 ms. Here it does so once.

    It also makes a table of types for each of its operations, and looks whether sums and products of whole numbers
    overflow, which those of such small tensors cannot: together a third of the time of the tests.
    """
    if not IS_INTERPRETED:
        yield
        return
    with pytest.MonkeyPatch.context() as patch, interpreter_beside_numpy():
        scope = interpreter._patch_lang(lambda: (tl, core))  # for what is seen by this function: both
        patch.setattr(interpreter, "_patch_lang", lambda _: interpreter._LangPatchScope())
        asked = interpreter._get_np_dtype
        known = cache(asked)  # of what can be hashed
        patch.setattr(interpreter, "_get_np_dtype", lambda it: (asked if it.scalar.is_ptr() else known)(it.scalar))
        options = interpreter.InterpreterOptions(sanitize_overflow=False)
        patch.setattr(interpreter.interpreter_builder, "options", options)
        yield
    scope.restore()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where tensors are made: the interpreter works on CPU tensors."""
    return torch.device("cpu" if IS_INTERPRETED else "cuda")


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=["float32", "float16", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Model dtypes; the interpreter computes bfloat16 wrongly and silently (triton #11584), so only a GPU runs it."""
    if request.param is torch.bfloat16 and IS_INTERPRETED:
        pytest.skip("Triton's interpreter computes bfloat16 wrongly")
    found: torch.dtype = request.param
    return found


@pytest.fixture
def guarded_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shows what an operation forgets to write, or writes outside of its tensors."""
    memory = GuardedMemory()
    memory.install(monkeypatch)
    yield
    memory.check()
