"""Projects of their own for the walk-through and the tests."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.compose.compose_project import ComposeProject, compose_project
from tests.compose.local_wheels import find_torch_wheel, served_index
from tests.compose.transcript import Transcript
from tests.compose.walkthrough import Walkthrough
from tests.support.free_port import free_port

FILES = ("compose.yaml", "tests/compose/compose.test.yaml")
WHEELS = "tests/compose/compose.wheels.yaml"


def walk(directory: Path, transcript: Transcript) -> None:
    """Everything, from the build to nothing left; files go into `directory`. Raises NoCompose."""
    port = free_port()
    with millrace_project({"REDIS_PORT": str(port)}) as project:
        Walkthrough(project, directory, port, transcript).run()


@contextmanager
def millrace_project(environment: Mapping[str, str], *files: str) -> Iterator[ComposeProject]:
    """compose.yaml with the changes for tests, and with other files on top. Raises NoCompose.

    torch comes from TORCH_INDEX where that is set, else from a wheel on this machine, else from PyTorch's index.
    """
    with _torch() as (for_wheels, index):
        name = f"millrace-test-{os.getpid()}"
        with compose_project(name, [*FILES, *files, *for_wheels], {**environment, **index}) as project:
            yield project


@contextmanager
def _torch() -> Iterator[tuple[list[str], Mapping[str, str]]]:
    wheel = None if "TORCH_INDEX" in os.environ else find_torch_wheel()
    if wheel is None:
        yield [], {}
    else:
        with served_index(wheel) as url:
            yield [WHEELS], {"TORCH_INDEX": url}
