"""What the queue's figures were measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tests.support.redis_server import redis_executable

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("celery", "redis", "pydantic", "tokenizers")


@dataclass(frozen=True)
class QueueMachine:
    """CPU and software."""

    cpu: str
    num_cpus: int  # workers, Redis and producer share them
    load: float  # runnable processes over the minute before
    versions: str
    commit: str  # "unknown" outside a git checkout
    dirty: bool | None  # whether tracked files differ from the commit

    @classmethod
    def read(cls) -> QueueMachine:
        """This machine."""
        server = _output([redis_executable(), "--version"]) or "unknown"
        packages = ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)
        changed = _output(["git", "status", "--porcelain", "--untracked-files=no"])
        return cls(
            cpu=_cpu(),
            num_cpus=len(os.sched_getaffinity(0)),
            load=os.getloadavg()[0],
            versions=f"Python {platform.python_version()}, {server.partition(' sha')[0]}, {packages}",
            commit=_output(["git", "rev-parse", "HEAD"]) or "unknown",
            dirty=None if changed is None else bool(changed),
        )


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _output(command: Sequence[str]) -> str | None:
    """What the command prints, None where it fails or is not there."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
