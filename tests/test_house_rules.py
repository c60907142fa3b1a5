"""The rules of this code base that no linter holds."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("settings", "kernels", "engine", "worker")
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 40
MAX_KERNEL_LINES = 90
MAX_PARAMETERS = 6
BANNED_NAMES = {"utils.py", "misc.py", "common.py", "helpers.py"}
DOCSTRING_ONLY = ("kernels/__init__.py", "engine/__init__.py")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _is_kernel(path: Path) -> bool:
    return _name(path).startswith("kernels/")


def _functions(path: Path) -> Iterator[Function]:
    for node in ast.walk(_tree(path)):
        if isinstance(node, Function):
            yield node


def _code_lines(function: Function) -> int:
    """Lines of a function from its name to its end, without its docstring."""
    first = function.body[0]
    docstring = 0
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        docstring = (first.end_lineno or 0) - first.lineno + 1
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def _num_parameters(function: Function) -> int:
    arguments = function.args
    named = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in named if name not in ("self", "cls")])


def test_a_file_fits_its_budget() -> None:
    sources = _sources(*PACKAGES, "tests")
    lines = {_name(path): len(path.read_text().splitlines()) for path in sources}
    long = {name: count for name, count in lines.items() if count > MAX_FILE_LINES}
    assert not long, f"lines {long}; the budget is {MAX_FILE_LINES}"
    assert not [_name(path) for path in sources if path.name in BANNED_NAMES]


def test_functions_fit_their_budget() -> None:
    long = {
        (_name(path), function.name): _code_lines(function)
        for path in _sources(*PACKAGES)
        for function in _functions(path)
        if _code_lines(function) > (MAX_KERNEL_LINES if _is_kernel(path) else MAX_FUNCTION_LINES)
    }
    assert not long, f"lines of code {long}; the budget is {MAX_FUNCTION_LINES}, of kernels {MAX_KERNEL_LINES}"


def test_functions_take_few_parameters() -> None:
    wide = {
        (_name(path), function.name): _num_parameters(function)
        for path in _sources(*PACKAGES)
        if not _is_kernel(path)
        for function in _functions(path)
        if _num_parameters(function) > MAX_PARAMETERS
    }
    assert not wide, f"parameters {wide}; the budget is {MAX_PARAMETERS}"


@pytest.mark.parametrize(("kind", "instead"), [(ast.Global, "an argument"), (ast.Assert, "a typed error")])
def test_nothing_is_global_and_nothing_is_asserted_to_users(kind: type[ast.stmt], instead: str) -> None:
    places = [
        f"{_name(path)}:{node.lineno}"
        for path in _sources(*PACKAGES)
        for node in ast.walk(_tree(path))
        if isinstance(node, kind)
    ]
    assert not places, f"{kind.__name__} in {places}; instead: {instead}"


@pytest.mark.parametrize("name", DOCSTRING_ONLY)
def test_packages_that_must_import_nothing_import_nothing(name: str) -> None:
    body = ast.parse((ROOT / name).read_text()).body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)


def test_no_producer_module_pulls_in_torch() -> None:
    code = "import worker.client, worker.schemas, worker.app, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
