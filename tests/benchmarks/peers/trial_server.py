"""One side of a comparison: a process that holds the model and runs a trial at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.benchmarks.peers.servers.trial_loop import TrialAnswer

ROOT = Path(__file__).resolve().parents[3]
STOP_TIMEOUT_S = 30.0
LOG_TAIL_CHARACTERS = 2000


class TrialServerFailed(Exception):
    """The process ended before it answered; the text has the end of its log."""


class TrialServer:
    """Stopped (SIGSTOP, with every process it started) whenever it is not running a trial: it takes no processor time
    from the other side, whatever its threads do between two trials.
    """

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log
        self.about: dict[str, str] = self._read()["about"]
        self._signal(signal.SIGSTOP)

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> TrialAnswer:
        """Run one trial. Raises TrialServerFailed; AssertionError where an answer is not `max_tokens` long."""
        self._signal(signal.SIGCONT)
        self._write({"prompts": prompts, "max_tokens": max_tokens})
        answer = self._read()
        self._signal(signal.SIGSTOP)
        lengths = {len(output) for output in answer["outputs"]}
        if len(answer["outputs"]) != len(prompts) or lengths != {max_tokens}:
            raise AssertionError(f"{len(answer['outputs'])} outputs of {sorted(lengths)} tokens, not {max_tokens}")
        return TrialAnswer(seconds=answer["seconds"], outputs=answer["outputs"])

    def close(self) -> None:
        """Let the process end; what is still there after STOP_TIMEOUT_S is killed, and so is what it started."""
        with suppress(ProcessLookupError):
            self._signal(signal.SIGCONT)
        with suppress(subprocess.TimeoutExpired):
            self._process.communicate("", timeout=STOP_TIMEOUT_S)
        _kill_group(self._process)

    def _write(self, value: object) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # `_read` says why
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise TrialServerFailed(self._log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:])
        return json.loads(line)

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)


@contextmanager
def trial_server(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[TrialServer]:
    """Start it, wait until it has loaded its model, end it. Raises TrialServerFailed."""
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,  # a group of its own, to be stopped and killed whole
        )
    try:
        yield (server := TrialServer(process, log))
        server.close()
    finally:
        _kill_group(process)


def _kill_group(process: subprocess.Popen[str]) -> None:
    """Kill the process and all that it started, where they have not ended, and close its pipes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(STOP_TIMEOUT_S)
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(BrokenPipeError):
            pipe.close()
