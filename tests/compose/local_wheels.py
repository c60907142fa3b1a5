"""The wheel of torch that lies on this machine, for a build that does not reach PyTorch's index."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory


def find_torch_wheel() -> Path | None:
    """A CPU wheel of torch in the directories where pip looks by its configuration (find-links), if there is one."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    configured = subprocess.run(command, capture_output=True, check=False, text=True).stdout
    directories = f"{configured} {os.environ.get('PIP_FIND_LINKS', '')}".split()
    return next((wheel for name in directories for wheel in sorted(Path(name).glob("torch-*+cpu-*.whl"))), None)


# The URL is an argument of the build: another port would install everything again.
PORT = 18_765


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
