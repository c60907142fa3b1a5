"""Makes the folder of wheels that a machine with a GPU lacks, and stands in for such a machine by refusing imports.

`python -m tests.benchmarks.gpu.wheels DIRECTORY` downloads the wheels, some 6 MB, and prints how they are installed
where nothing can be downloaded. What such a machine has is PyTorch's own set (Python 3.12, torch 2.11, triton 3.6,
transformers 5.17): no pydantic, no structlog, no llguidance, and nothing of Redis and Celery, which the engine, the
kernels and the settings do not need.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

PYTHON = "3.12"
# What the machine has, and everything that these need.
PRESENT = (
    *("torch", "triton", "transformers", "numpy", "safetensors", "tokenizers", "jinja2"),
    *("pytest", "pytest-timeout", "pytest-xdist", "hypothesis"),
)
# What engine, kernels and settings need beside that, each with its own needs. The versions are this environment's.
WHEELS = (
    *("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "typing-extensions"),
    *("pydantic-settings", "python-dotenv", "structlog", "llguidance"),
)
# pip takes each as it is written, so every one that a wheel may be named for.
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in (35, 34, 31, 28, 27, 24, 17)), "manylinux2014_x86_64")
OWN = frozenset(("settings", "kernels", "engine", "tests"))  # not `worker`: it needs Redis and Celery

INSTALL = """\
python3 -m pip install --no-index --no-deps --no-compile --target /tmp/site {directory}/*.whl
export PYTHONPATH=/tmp/site"""
# Python imports it at every start, so the processes that a script starts are held to the same.
BLOCKER = "from tests.benchmarks.gpu.wheels import refuse_other_imports\n\nrefuse_other_imports()\n"


def download_command(directory: Path) -> list[str]:
    """pip's command line for the wheels in the versions of this environment."""
    chosen = [f"{name}=={metadata.version(name)}" for name in WHEELS]
    target = ["--python-version", PYTHON, "--implementation", "cp", "--only-binary", ":all:", "--no-deps"]
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    return [sys.executable, "-m", "pip", "download", "--quiet", *target, *platforms, "--dest", str(directory), *chosen]


def write_blocker(directory: Path) -> Path:
    """A folder that, first in PYTHONPATH, refuses in every process what the machine does not have."""
    (directory / "sitecustomize.py").write_text(BLOCKER)
    return directory


def refuse_other_imports() -> None:
    """From here on this process finds what such a machine has, the wheels and our own packages, as if no other package
    were installed.
    """
    present = with_requirements([*PRESENT, *WHEELS])
    installed = metadata.packages_distributions().items()
    refused = {name for name, found in installed if not present & {*map(_plain, found)}} - OWN | {"worker"}
    sys.meta_path[:] = [_Finder(finder, frozenset(refused), present) for finder in sys.meta_path]


def with_requirements(names: Iterable[str]) -> set[str]:
    """The distributions and all that these need, without their extras, as this environment has them."""
    found: set[str] = set()
    wanted = [_plain(name) for name in names]
    while wanted:
        name = wanted.pop()
        if name not in found and _is_installed(name):
            found.add(name)
            wanted += [_plain(requirement.name) for requirement in requirements(name)]
    return found


def requirements(name: str) -> list[Requirement]:
    """What a distribution needs here, without its extras."""
    known = [Requirement(text) for text in metadata.requires(name) or []]
    return [r for r in known if r.marker is None or r.marker.evaluate({"extra": ""})]


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


class _Finder:
    """Another finder, but for what is refused: that it neither imports nor lists."""

    def __init__(self, finder: Any, refused: frozenset[str], present: set[str]) -> None:
        self._finder = finder
        self._refused = refused
        self._present = present

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        is_refused = name.partition(".")[0] in self._refused
        return None if is_refused else self._finder.find_spec(name, path, target)

    def find_distributions(self, *context: Any) -> Iterator[metadata.Distribution]:
        """What `importlib.metadata` sees: pytest, for one, imports the plugins of every distribution."""
        find = getattr(self._finder, "find_distributions", lambda *_: ())
        return (known for known in find(*context) if _plain(known.metadata["Name"]) in self._present)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Download the wheels and print how to install them; pip's exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu.wheels", description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path, metavar="DIRECTORY", help="is made; `.wheels` is ignored by git")
    directory: Path = parser.parse_args(arguments).directory
    code = subprocess.run(download_command(directory), check=False).returncode
    if code == 0:
        found = sorted(directory.glob("*.whl"))
        print(*(f"{path.stat().st_size / 1e6:6.2f} MB  {path.name}" for path in found), sep="\n")
        print(f"{sum(path.stat().st_size for path in found) / 1e6:6.2f} MB together; there:\n")
        print(INSTALL.format(directory=directory))
    return code


if __name__ == "__main__":
    sys.exit(main())
