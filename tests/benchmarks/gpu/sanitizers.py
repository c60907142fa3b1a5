"""Runs compute-sanitizer over a small launch of each kernel, many a process; `python -m` with their names is such one.

Without a GPU the launches run in Triton's interpreter, and no tool watches them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from queue import SimpleQueue
from typing import Any

import torch

import kernels.triton
from engine.loading.derived_settings import usable_cores
from kernels.triton.compilation import compile_ahead, settle_keys
from tests.benchmarks.gpu.sweeps import NO_GPU, Figures, Place
from tests.benchmarks.machine import ROOT
from tests.benchmarks.operation_cases import OperationCase, operation_cases
from tests.support.devices import interpreter_beside_numpy

# Errors of the CUDA API are left to PyTorch, which raises them: it also makes some on purpose. A launch that faults
# ends alone, and the process goes on.
TOOLS = {"memcheck": ("--report-api-errors", "no", "--destroy-on-device-error", "kernel"), "racecheck": ()}
OPTIONS = (
    *("--target-processes", "application-only", "--error-exitcode", "9"),
    *("--launch-timeout", "120", "--print-limit", "300"),
)
INSTALLED = "/usr/local/cuda/bin"  # where it lies if PATH does not say
PROCESSES = 2  # of a tool, side by side
BEGINS, ENDS, RAISED, REPORTED = "case begins: ", "case ends: ", "raised: ", "========="
NO_FINDING = ("COMPUTE-SANITIZER", "SUMMARY")
SETTLE_S = 0.05  # in which the tool says what it found, before the next launch
MAX_LINES = 8  # of what it says of one case
NUM_TRIES = 3  # of a process that ended in the middle, each behind the case at which it did

Report = Callable[[dict[str, Any] | None], None]


def launch_ahead(cases: Sequence[OperationCase], device: torch.device) -> None:
    """Compile what these cases launch, in as many processes as there are cores, without launching it."""

    def run() -> None:
        for case in cases:
            with suppress(Exception):  # a seam: it is raised again where the case is checked
                case.run(kernels.triton, device)

    compile_ahead(run, usable_cores())


def small_cases() -> list[OperationCase]:
    """Those that together launch every kernel of ours: all but the product by a library's."""
    return [case for case in operation_cases(torch.float16, is_tiny=True) if case.name != "linear 3"]


def sanitizers(place: Place) -> Figures:
    """A figure a tool and case, in which the tool found nothing or what it said; and a last one of each process."""
    path = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}{os.pathsep}{INSTALLED}")
    if path is None and place.has_gpu:
        raise FileNotFoundError("compute-sanitizer: not found on PATH")
    cases = small_cases()
    launch_ahead(cases, place.device)
    names = [case.name for case in cases]
    queue: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
    shares = [(tool, names[part::PROCESSES]) for tool in TOOLS for part in range(PROCESSES)]

    def check(share: tuple[str, list[str]]) -> None:
        tool, mine = share
        try:
            ToolRun(tool, tool_command(tool, path), place, queue.put).check(mine)
        finally:
            queue.put(None)

    num_good, num_running = 0, len(shares)
    with ThreadPoolExecutor(len(shares)) as threads:
        done = [threads.submit(check, share) for share in shares]
        while num_running:
            figure = queue.get()
            num_running -= figure is None
            if figure is not None:
                num_good += "case" in figure and figure["ok"]
                yield figure | {"ran_on": place.ran_on("Triton's interpreter, without a tool")}
    for each in done:
        each.result()  # raises what ended it
    headline = f"nothing found in {num_good} of {len(names) * len(TOOLS)} runs of {len(names)} cases"
    yield {"figure": "all", "headline": headline if place.has_gpu else NO_GPU}


def tool_command(tool: str, path: str | None) -> list[str]:
    """What the names of cases are put behind. path: of compute-sanitizer; None runs them without it."""
    watched = [] if path is None else [path, "--tool", tool, *TOOLS[tool], *OPTIONS]
    return [*watched, sys.executable, "-m", "tests.benchmarks.gpu.sanitizers"]


class ToolRun:
    """One tool over some cases, in one process unless that ends in the middle: then the next has those behind."""

    def __init__(self, tool: str, command: Sequence[str], place: Place, report: Report) -> None:
        """command: the names are put behind it. report: takes each figure as it comes."""
        self._tool = tool
        self._command = command
        self._place = place
        self._report = report
        self._summary: list[str] = []  # what was said outside of any case, and the tool's last words

    def check(self, names: Sequence[str]) -> None:
        """Report each case, then which were not reached."""
        left, code = list(names), 0
        for _ in range(NUM_TRIES):
            num_begun, code = self._run(left)
            left = left[num_begun:]
            if not left or not num_begun or self._place.deadline.left_s <= 0:
                break
        self._report(
            {
                "figure": f"{self._tool}, {len(names)} cases",
                "ok": not left and code == 0,
                "exit_code": code,
                "not_reached": left,
                "said": self._summary[-MAX_LINES:],
            }
        )

    def _run(self, names: Sequence[str]) -> tuple[int, int]:
        """How many cases began, and the exit code."""
        # Each of torch's allocations by itself, or a launch that writes past one lands in the next unseen.
        environment = dict(os.environ, PYTORCH_NO_CUDA_MEMORY_CACHING="1", PYTHONUNBUFFERED="1")
        num_begun, case, found = 0, "", list[str]()
        screen, written = _screen()
        with subprocess.Popen(
            [*self._command, *names],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=written,
            start_new_session=True,  # so that the tool's process ends with it
        ) as process:
            os.close(written)
            left_s = min(max(self._place.deadline.left_s, 0.1), threading.TIMEOUT_MAX)
            timer = threading.Timer(left_s, os.killpg, (process.pid, signal.SIGKILL))
            timer.start()
            for line in _lines(screen):
                print(f"{self._tool}: {line}", end="", file=sys.stderr, flush=True)
                if line.startswith(BEGINS):
                    num_begun, case, found = num_begun + 1, line.removeprefix(BEGINS).strip(), []
                elif line.startswith(ENDS):
                    self._report(self._figure(case, found))
                    case = ""
                elif finding := _finding(line):
                    (found if case else self._summary).append(finding)
                elif "SUMMARY" in line:
                    self._summary.append(line.removeprefix(REPORTED).strip())
            code = process.wait()
            timer.cancel()
        if case:
            self._report(self._figure(case, [*found[: MAX_LINES - 1], f"the process ended in it, exit code {code}"]))
        return num_begun, code

    def _figure(self, case: str, found: list[str]) -> dict[str, Any]:
        what = {"found": found[:MAX_LINES]} if found else {}
        return {"figure": f"{self._tool}: {case}", "case": case, "ok": not found, **what}


def _screen() -> tuple[int, int]:
    """To read from and to write to: a terminal, since into a pipe the tool may write late what it found in a case that
    has long ended; a pipe where there are no terminals.
    """
    try:
        return os.openpty()
    except OSError:
        print("no terminal: what a tool says may be told of a later case", file=sys.stderr)
        return os.pipe()


def _lines(screen: int) -> Iterator[str]:
    """What is written to a terminal; closes it."""
    with open(screen, errors="replace") as lines, suppress(OSError):  # which is how a terminal ends
        yield from lines


def _finding(line: str) -> str:
    """What a line says that a tool or a case was not content with; "" where it says nothing of the kind."""
    if line.startswith(RAISED):
        return line.strip()
    said = line.removeprefix(REPORTED).strip()
    return said if line.startswith(REPORTED) and not any(word in said for word in NO_FINDING) else ""


def main() -> None:
    """Launch the cases that the arguments name, one after the other, and say which one is at work."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = {case.name: case for case in small_cases()}
    if device.type == "cuda":
        settle_keys()  # by which it finds what was compiled ahead
    with nullcontext() if device.type == "cuda" else interpreter_beside_numpy():
        for name in sys.argv[1:]:
            print(f"{BEGINS}{name}", flush=True)
            try:
                cases[name].run(kernels.triton, device)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                    time.sleep(SETTLE_S)
            except Exception as raised:  # a seam: a driver, a compiler and torch raise what they raise
                print(f"{RAISED}{type(raised).__name__}: {raised}".splitlines()[0][:200], flush=True)
            print(f"{ENDS}{name}", flush=True)


if __name__ == "__main__":
    main()
