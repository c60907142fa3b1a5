"""A worker's container, from outside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.compose.compose_project import docker, inspect

# The container's init is process 1; what it runs is its only child.
_SIGNAL = 'kill -{} "$(cat /proc/1/task/1/children)"'


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
