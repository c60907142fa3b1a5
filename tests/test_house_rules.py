"""Rules of this code base that no linter checks: sizes, folders, names and what is never written."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("settings", "kernels", "engine", "worker")
BANNED_NAMES = {"utils.py", "misc.py", "common.py", "helpers.py"}
DOCSTRING_ONLY = ("kernels", "engine", "engine/*", "worker", "worker/*")  # settings and each device's kernels export

MAX_FILE_LINES = 450
MAX_MODULES = 260  # one of which holds only names
MAX_CODE_LINES = 50_930
MAX_TEST_FILES = 242
MAX_OTHER_TEST_FILES = 80
# Lines -> the share of modules that may be shorter: a small file is opened for next to nothing.
MAX_SHARES = {20: 0.03, 50: 0.10}
# Likewise a module of one short function or class.
MIN_ONLY_DEFINITION_LINES = 15
MAX_LONELY_DEFINITIONS = 10

MAX_FUNCTION_LINES = 40
MAX_KERNEL_LINES = 96
MAX_PARAMETERS = 6
MAX_TEST_NAME = 70  # characters

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


def _sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def _modules() -> list[Path]:
    """The modules of the code; `__init__.py` does not count."""
    return [path for path in _sources(*PACKAGES) if path.name != "__init__.py"]


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _module(path: Path) -> str:
    return _name(path).removesuffix(".py").replace("/", ".")


@cache
def _num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _is_kernel(path: Path) -> bool:
    return _name(path).startswith("kernels/")


def _functions(path: Path) -> Iterator[Function]:
    for node in ast.walk(_tree(path)):
        if isinstance(node, Function):
            yield node


def _lines(node: Definition) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


def _code_lines(function: Function) -> int:
    """Lines of a function from its name to its end, without its docstring."""
    first = function.body[0]
    docstring = (first.end_lineno or 0) - first.lineno + 1 if _is_docstring(first) else 0
    return _lines(function) - docstring


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _num_parameters(function: Function) -> int:
    arguments = function.args
    named = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in named if name not in ("self", "cls")])


def test_a_file_fits_its_budget() -> None:
    sources = _sources(*PACKAGES, "tests")
    long = {_name(path): _num_lines(path) for path in sources if _num_lines(path) > MAX_FILE_LINES}
    assert not long, f"lines {long}; the budget is {MAX_FILE_LINES}"
    assert not [_name(path) for path in sources if path.name in BANNED_NAMES]


def test_there_are_not_too_many_files() -> None:
    tests = _sources("tests")
    test_files = [path for path in tests if path.name.startswith("test_")]
    assert len(_modules()) <= MAX_MODULES
    assert len(test_files) <= MAX_TEST_FILES
    assert len(tests) - len(test_files) <= MAX_OTHER_TEST_FILES


def test_the_code_does_not_grow() -> None:
    num_lines = sum(_num_lines(path) for path in _sources(*PACKAGES) if _holds_code(path))
    assert num_lines <= MAX_CODE_LINES, f"{num_lines} lines; the budget is {MAX_CODE_LINES}"


def _holds_code(path: Path) -> bool:
    """Whether more than a docstring, imports and names is in it, as in a package's file it often is not."""
    return not all(isinstance(node, ast.Expr | ast.Import | ast.ImportFrom | ast.Assign) for node in _tree(path).body)


@pytest.mark.parametrize(("min_lines", "max_share"), MAX_SHARES.items())
def test_few_modules_are_small(min_lines: int, max_share: float) -> None:
    modules = _modules()
    small = {_name(path): _num_lines(path) for path in modules if _num_lines(path) < min_lines}
    assert len(small) <= max_share * len(modules), f"{small}: more than {max_share:.0%} of {len(modules)} modules"


def test_few_modules_are_there_for_one_small_definition() -> None:
    lonely = {}
    for path in _modules():
        definitions = [node for node in _tree(path).body if isinstance(node, Definition)]
        if len(definitions) == 1 and _lines(definitions[0]) < MIN_ONLY_DEFINITION_LINES:
            lonely[_name(path)] = definitions[0].name
    assert len(lonely) <= MAX_LONELY_DEFINITIONS, lonely


def _room(module: str) -> str:
    """The folder of a module; the module itself if it lies directly in a package."""
    return ".".join(module.split(".")[:2])


def _imported(path: Path) -> Iterator[str]:
    """The full name of each import anywhere in a file: a module, or something in one."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_folders_do_not_import_each_other_in_a_circle() -> None:
    names = {_module(path): path for path in _modules()}
    rooms = {_room(name) for name in names}
    wanted: dict[str, set[str]] = {room: set() for room in rooms}
    for name, path in names.items():
        wanted[_room(name)] |= {_room(other) for other in _imported(path)} & rooms - {_room(name)}
    try:
        TopologicalSorter(wanted).prepare()
    except CycleError as knot:
        pytest.fail(f"each imports from the one before it: {knot.args[1]}")


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


def test_a_tests_name_is_one_sentence() -> None:
    long = {
        _name(path): function.name
        for path in _sources("tests")
        for function in _functions(path)
        if function.name.startswith("test_") and len(function.name) > MAX_TEST_NAME
    }
    assert not long, f"{long}: more than {MAX_TEST_NAME} characters"


@pytest.mark.parametrize(("kind", "instead"), [(ast.Global, "an argument"), (ast.Assert, "a typed error")])
def test_nothing_is_global_and_nothing_is_asserted_to_users(kind: type[ast.stmt], instead: str) -> None:
    places = [
        f"{_name(path)}:{node.lineno}"
        for path in _sources(*PACKAGES)
        for node in ast.walk(_tree(path))
        if isinstance(node, kind)
    ]
    assert not places, f"{kind.__name__} in {places}; instead: {instead}"


def test_packages_import_nothing() -> None:
    """Importing one module of a package must not import the others, and torch with them."""
    packages = [path for folder in DOCSTRING_ONLY for path in ROOT.glob(f"{folder}/__init__.py")]
    assert len(packages) > 10
    full = [_name(path) for path in packages if [*map(_is_docstring, _tree(path).body)] != [True]]
    assert not full, f"more than a docstring in {full}"


@pytest.mark.parametrize("path", [path for path in _modules() if path.name == "errors.py"], ids=_name)
def test_errors_hold_exceptions_and_nothing_else(path: Path) -> None:
    module = importlib.import_module(_module(path))
    own = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    assert own
    assert not [value for value in own if not (isinstance(value, type) and issubclass(value, Exception))]


def test_no_producer_module_pulls_in_torch() -> None:
    code = "import worker.client, worker.schemas, worker.app, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_extension_names_every_native_source() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    [extension] = project["tool"]["setuptools"]["ext-modules"]
    sources = {_name(path) for path in (ROOT / "kernels/native/src").iterdir()}
    assert sources | {"kernels/native/build.py"} == {*extension["sources"], *extension["depends"]}
