"""What the queue's figures were measured on."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tests.benchmarks.checkout import Checkout, command_output
from tests.support.redis_server import redis_executable

PACKAGES = ("celery", "redis", "pydantic", "tokenizers")


@dataclass(frozen=True)
class QueueMachine:
    """CPU and software."""

    cpu: str
    num_cpus: int  # workers, Redis and producer share them
    load: float  # runnable processes over the minute before
    versions: str
    checkout: Checkout

    @classmethod
    def read(cls) -> QueueMachine:
        """This machine."""
        server = command_output([redis_executable(), "--version"]) or "unknown"
        packages = ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)
        return cls(
            cpu=_cpu(),
            num_cpus=len(os.sched_getaffinity(0)),
            load=os.getloadavg()[0],
            versions=f"Python {platform.python_version()}, {server.partition(' sha')[0]}, {packages}",
            checkout=Checkout.read(),
        )


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
