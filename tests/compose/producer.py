"""A producer on the host, as README.md describes it: the `millrace` command with a password file."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import SecretStr

from settings import RedisSettings
from tests.chaos.undisturbed import Record, contents
from tests.support.millrace import COMMAND
from tests.support.records import read_records
from worker.client import BatchClient

JOB_TIMEOUT_S = 300.0


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
