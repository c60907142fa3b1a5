"""Drives one Compose project as a person does, by `docker compose` or the older `docker-compose`, and its producer.

The producer runs on the host as README.md describes it: the `millrace` command with a password file. The wheel of torch
that lies on this machine is served to a build that does not reach PyTorch's index.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

from pydantic import SecretStr

from settings import RedisSettings
from tests.chaos.jobs import Record, contents
from tests.support.request_lines import read_records
from tests.support.workers import COMMAND
from worker.client import BatchClient

ROOT = Path(__file__).resolve().parents[2]
COMMAND_TIMEOUT_S = 120.0
BUILD_TIMEOUT_S = 1800.0
_KINDS = {"container": ("ps", "--all"), "network": ("network", "ls"), "volume": ("volume", "ls")}

# The container's init is process 1; what it runs is its only child.
_SIGNAL = 'kill -{} "$(cat /proc/1/task/1/children)"'

# The URL is an argument of the build: another port would install everything again.
PORT = 18_765

JOB_TIMEOUT_S = 300.0


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


@dataclass(frozen=True)
class WorkerContainer:
    """One container of the service `worker`."""

    id: str

    @property
    def name(self) -> str:
        return str(inspect(self.id)["Name"]).removeprefix("/")

    @property
    def state(self) -> dict[str, Any]:
        """Docker's account of it."""
        state: dict[str, Any] = inspect(self.id)["State"]
        return state

    @property
    def health(self) -> str:
        """starting, healthy or unhealthy."""
        return str(self.state["Health"]["Status"])

    @property
    def num_restarts(self) -> int:
        """How often the restart policy started it again."""
        return int(inspect(self.id)["RestartCount"])

    def signal(self, name: str) -> None:
        """Send the worker's process a signal from inside: to Docker the end it brings is the process's own."""
        self.execute("sh", "-c", _SIGNAL.format(name))

    def execute(self, *command: str) -> str:
        """What a command inside prints."""
        return docker("exec", self.id, *command)


def find_torch_wheel() -> Path | None:
    """A CPU wheel of torch in the directories where pip looks by its configuration (find-links), if there is one."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    configured = subprocess.run(command, capture_output=True, check=False, text=True).stdout
    directories = f"{configured} {os.environ.get('PIP_FIND_LINKS', '')}".split()
    return next((wheel for name in directories for wheel in sorted(Path(name).glob("torch-*+cpu-*.whl"))), None)


@contextmanager
def served_index(wheel: Path) -> Iterator[str]:
    """An index on this machine with this wheel of torch and nothing else; yields its URL."""
    with TemporaryDirectory() as directory:
        project = Path(directory) / "torch"
        project.mkdir()
        (project / wheel.name).symlink_to(wheel)
        with ThreadingHTTPServer(("127.0.0.1", PORT), partial(_QuietHandler, directory=directory)) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            try:
                yield f"http://127.0.0.1:{PORT}/"
            finally:
                server.shutdown()


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing: pip asks for every package."""


class Producer:
    """Submits one file of requests as often as asked, and compares the results."""

    def __init__(self, directory: Path, url: str, password: str, lines: Iterable[Mapping[str, object]]) -> None:
        self._directory = directory
        self.requests = directory / "requests.jsonl"
        self.requests.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        password_file = directory / "producer.password"
        password_file.write_text(password)
        # Where Redis is encrypted, its certificate is in the directory.
        ca_file = directory / "ca.crt" if url.startswith("rediss:") else None
        self._settings = RedisSettings(url=SecretStr(url), password_file=password_file, ca_file=ca_file)
        ours = {"URL": url, "PASSWORD_FILE": str(password_file), "CA_FILE": "none" if ca_file is None else str(ca_file)}
        theirs = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")}
        self._environment = theirs | {f"MILLRACE_REDIS__{name}": value for name, value in ours.items()}

    def client(self) -> BatchClient:
        """The same from Python."""
        return BatchClient(self._settings)

    def submit(self) -> str:
        """The job's id."""
        return self._millrace("submit", str(self.requests)).strip()

    def results(self, job_id: str) -> dict[str, Record]:
        """Wait until the job has completed; its records by custom_id, without what differs between any two runs.

        Two records of one request are an AssertionError.
        """
        path = self._directory / f"{job_id}.jsonl"
        self._millrace("watch", job_id)
        self._millrace("results", job_id, "-o", str(path))
        return contents(read_records(path))

    def _millrace(self, *arguments: str) -> str:
        done = subprocess.run(
            [*COMMAND, *arguments],
            env=self._environment, capture_output=True, check=False, timeout=JOB_TIMEOUT_S, text=True,
        )  # fmt: skip
        assert done.returncode == 0, f"millrace {' '.join(arguments)}: {done.returncode}\n{done.stderr[-2000:]}"
        return done.stdout


class Transcript:
    """Lines with the seconds since the start, written as they come."""

    def __init__(self, *streams: TextIO) -> None:
        self._streams = streams
        self._started_s = time.monotonic()

    def say(self, text: str) -> None:
        """One event."""
        self._write(f"{time.monotonic() - self._started_s:6.1f} s  {text}")

    def show(self, output: str) -> None:
        """What a command printed."""
        for line in output.rstrip().splitlines():
            self._write(f"          | {line.rstrip()}")

    def wait(self, what: str, condition: Callable[[], object], timeout_s: float) -> None:
        """Return once `condition` holds, and say so; an AssertionError after `timeout_s` seconds."""
        until_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < until_s, f"not so after {timeout_s:.0f} s: {what}"
            time.sleep(0.1)
        self.say(what)

    def _write(self, line: str) -> None:
        for stream in self._streams:
            print(line, file=stream, flush=True)
