"""One Compose project, driven as a person drives it: by `docker compose`, or the older `docker-compose`."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COMMAND_TIMEOUT_S = 120.0
BUILD_TIMEOUT_S = 1800.0
_KINDS = {"container": ("ps", "--all"), "network": ("network", "ls"), "volume": ("volume", "ls")}


class NoCompose(Exception):
    """No Docker daemon answers, or there is no Compose; the message says which."""


def find_compose() -> tuple[str, ...]:
    """The command that runs Compose here. Raises NoCompose."""
    if not _answers("docker", "info"):
        raise NoCompose("no Docker daemon answers to `docker info`")
    for command in (("docker", "compose"), ("docker-compose",)):
        if _answers(*command, "version"):
            return command
    raise NoCompose("neither `docker compose` nor `docker-compose` is installed")


class ComposeProject:
    """A project of its own name, from compose.yaml and files that change it, with an environment that fills them in."""

    def __init__(self, name: str, files: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self._label = f"label=com.docker.compose.project={name}"
        self._environment = {**os.environ, **environment}
        named = [word for file in files for word in ("--file", str(ROOT / file))]
        self._command = [*find_compose(), "--project-name", name, "--project-directory", str(ROOT), *named]

    def run(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """What `docker compose ARGUMENTS` prints; a failure is an AssertionError that shows its end."""
        return _run([*self._command, *arguments], self._environment, timeout_s)

    def build(self) -> None:
        """Build the images of the services that start by themselves."""
        self.run("build", timeout_s=BUILD_TIMEOUT_S)

    def secret(self, user: str) -> str:
        """The password of `producer`, `worker`, `flower` or `admin`."""
        file = f"/secrets/{user}/password"
        return self.run("run", "--rm", "-T", "--no-deps", "--entrypoint", "cat", "acl", file).strip()

    def containers(self, service: str) -> list[str]:
        """The ids of a service's containers, running or not, by number."""
        of_project, of_service = self._label, f"label=com.docker.compose.service={service}"
        found = docker("ps", "--all", "--quiet", "--filter", of_project, "--filter", of_service)
        number = "com.docker.compose.container-number"
        return sorted(found.split(), key=lambda container: int(inspect(container)["Config"]["Labels"][number]))

    def remains(self) -> list[str]:
        """What of the project there is: containers, networks and volumes."""
        found = {kind: docker(*command, "--quiet", "--filter", self._label).split() for kind, command in _KINDS.items()}
        return [f"{kind} {name}" for kind, names in found.items() for name in names]


@contextmanager
def compose_project(name: str, files: Sequence[str], environment: Mapping[str, str]) -> Iterator[ComposeProject]:
    """A project that is taken down at the end, with its volumes, whatever happened."""
    project = ComposeProject(name, files, environment)
    try:
        yield project
    finally:
        project.run("down", "--volumes", "--timeout", "1")


def docker(*arguments: str) -> str:
    """What `docker ARGUMENTS` prints."""
    return _run(["docker", *arguments], os.environ, COMMAND_TIMEOUT_S)


def inspect(name: str) -> dict[str, Any]:
    """What Docker knows about a container or an image."""
    found: dict[str, Any] = json.loads(docker("inspect", name))[0]
    return found


def _run(command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> str:
    done = subprocess.run(command, capture_output=True, env=environment, check=False, timeout=timeout_s, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}"
    return done.stdout


def _answers(*command: str) -> bool:
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=COMMAND_TIMEOUT_S)
    except FileNotFoundError:
        return False
    return done.returncode == 0
