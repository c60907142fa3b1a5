"""The budgets and habits that no linter holds: sizes, parameters, globals, empty package files."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("settings", "kernels", "engine", "worker")
MAX_FILE_LINES = 300
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


def _functions(path: Path) -> Iterator[Function]:
    for node in ast.walk(ast.parse(path.read_text())):
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


@pytest.mark.parametrize("path", _sources(*PACKAGES, "tests"), ids=_name)
def test_a_file_fits_its_budget(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_FILE_LINES, f"{_name(path)} has {lines} lines; the budget is {MAX_FILE_LINES}"
    assert path.name not in BANNED_NAMES


@pytest.mark.parametrize("path", _sources(*PACKAGES), ids=_name)
def test_functions_fit_their_budget(path: Path) -> None:
    budget = MAX_KERNEL_LINES if _name(path).startswith("kernels/") else MAX_FUNCTION_LINES
    long = {f.name: _code_lines(f) for f in _functions(path) if _code_lines(f) > budget}
    assert not long, f"{_name(path)}: lines of code {long}; the budget is {budget}"


@pytest.mark.parametrize("path", [p for p in _sources(*PACKAGES) if not _name(p).startswith("kernels/")], ids=_name)
def test_functions_take_few_parameters(path: Path) -> None:
    wide = {f.name: _num_parameters(f) for f in _functions(path) if _num_parameters(f) > MAX_PARAMETERS}
    assert not wide, f"{_name(path)}: parameters {wide}; the budget is {MAX_PARAMETERS}"


@pytest.mark.parametrize("path", _sources(*PACKAGES), ids=_name)
def test_nothing_is_global_and_nothing_is_asserted_to_users(path: Path) -> None:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    assert not [n.lineno for n in nodes if isinstance(n, ast.Global)], f"{_name(path)} has a global statement"
    assert not [n.lineno for n in nodes if isinstance(n, ast.Assert)], f"{_name(path)} asserts; raise a typed error"


@pytest.mark.parametrize("path", _sources(*PACKAGES), ids=_name)
def test_a_file_has_at_most_one_public_class_but_for_families(path: Path) -> None:
    tree = ast.parse(path.read_text())
    public = [n.name for n in tree.body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")]
    families = {"errors.py", "item_result.py", "unified_refusal.py"}  # an error tree, a tagged union, enum and error
    assert len(public) <= 1 or path.name in families, f"{_name(path)} has {public}"


@pytest.mark.parametrize("name", DOCSTRING_ONLY)
def test_packages_that_must_import_nothing_import_nothing(name: str) -> None:
    body = ast.parse((ROOT / name).read_text()).body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)


def test_no_producer_module_pulls_in_torch() -> None:
    code = "import worker.client, worker.schemas, worker.app, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
