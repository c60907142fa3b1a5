"""Runs everything that a GPU's first minutes must answer, stage by stage: `--out DIRECTORY`, see `--help`.

Each stage is a process, or several that share its cases, whose figures are written, one JSON line each, as they come.
Stages that check run side by side, since imports, compilation and references keep the host busy; those that time run
alone. What fails, dies or hangs costs itself alone and is run again with CUDA_LAUNCH_BLOCKING=1, so that the second
error names the kernel. What a stage leaves of its time is there for those after it, and no stage takes a later one's.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import IO, Any, NamedTuple

ROOT = Path(__file__).resolve().parents[3]
MODULE = "tests.benchmarks.gpu.first_contact"

BUDGET_S = 450.0
LEAST_S = 5.0  # a stage that would get less is not begun
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
SPARE_S = 3.0  # before its process is ended, in which a stage says what it has
TRIAL = "no GPU or tiny shapes: no figure is a measurement"
NOT_MEASURED = "not measured"
MAX_ERROR_CHARS = 300
# Processes on a core, side by side. Each compiles in as many processes as it has cores, which import PyTorch first:
# five seconds, in which a core compiles four kernels.
CORE_SHARES = 2


@dataclass(frozen=True)
class Stage:
    """One process, or several with a part of its cases each, and the seconds they have at least."""

    name: str
    limit_s: float
    about: str
    checks: bool = False  # and times nothing: runs beside its neighbours that do the same, all with the largest limit
    parts: int = 1
    interpreted: bool = False  # without a GPU: in Triton's interpreter


# Together the budget. What decides whether anything else can be believed comes first, then figures, then choices.
STAGES = (
    Stage("machine", 25, "versions, rate of a copy and of a product"),
    Stage("compile", 50, "every launch, in parallel; registers, spills and shared memory against the kept table"),
    Stage("operations", 90, "every operation against the reference, padding NaN, same bits", True, 4, True),
    Stage("parity", 90, "tiny models against transformers, float32 and bfloat16", True, 4),
    Stage("graphs", 90, "tokens with graphs and without, waits of the host in a step", True, 2),
    Stage("warm-up", 90, "what is compiled after the warm-up: nothing", True),
    Stage("sanitizers", 90, "compute-sanitizer over a small launch of each kernel", True, 1, True),
    Stage("Qwen3-0.6B", 60, "decode at 64 and 256, prefill, nano-vllm's workload"),
    Stage("Qwen3-8B", 50, "decode at 64 and 256, prefill"),
    Stage("Qwen3-30B-A3B", 60, "decode at 64 and 256, prefill"),
    Stage("kernels", 45, "operations against what the GPU can do and other libraries"),
    Stage("attention", 45, "tiles, stages and splits of attention", interpreted=True),
    Stage("moe-tiles", 20, "tiles of the experts' products", interpreted=True),
    Stage("blas", 5, "cuBLAS or cuBLASLt for products without a bias"),
)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exit with 2 and one line if an argument cannot be used."""
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description=__doc__.partition("\n\n")[0],
        epilog="; ".join(f"{stage.name}: {stage.about}" for stage in STAGES),
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIRECTORY", help="for lines.jsonl, table.txt, ...")
    parser.add_argument("--only", action="append", choices=names, metavar="STAGE", help="this one; repeatable")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, metavar="S", help="for all stages together")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: with --tiny")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny shapes, to try the script: no figure is a measurement"
    )
    parser.add_argument(
        "--plant", action="append", default=[], metavar="STAGE[=die|=hang]", help="let this stage fail, to try that"
    )
    # What a stage's own process is told.
    parser.add_argument("--stage", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--job", nargs=3, type=int, default=(0, 0, 1), help=argparse.SUPPRESS)
    parser.add_argument("--limit-s", type=float, default=BUDGET_S, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu: needs --tiny")
    if options.budget_s <= 0:
        parser.error(f"--budget-s: {options.budget_s}; accepted: more than 0")
    for plant in options.plant:
        name, _, how = plant.partition("=")
        if name not in names or how not in ("", "die", "hang"):
            parser.error(f"--plant: {plant!r}; accepted: one of {', '.join(names)}, alone or with =die or =hang")
    options.stages = tuple(stage for stage in STAGES if not options.only or stage.name in options.only)
    return options


class Job(NamedTuple):
    """A process to run: a part of a stage, and which of how many side by side it is."""

    stage: Stage
    part: int
    number: int
    total: int


@dataclass
class StageRun:
    """How a stage's process went, and what it said."""

    stage: Stage
    part: int
    ended: str  # "ok", or how it failed
    seconds: float = 0.0
    blocking: bool = False  # with CUDA_LAUNCH_BLOCKING=1
    error: str = ""
    figures: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether it came to its end and nothing that it checked was wrong."""
        return self.ended == "ok" and all(figure.get("ok", True) for figure in self.figures)

    def names(self) -> dict[str, Any]:
        """What each of its lines begins with."""
        return {"stage": self.stage.name} | ({"part": self.part} if self.stage.parts > 1 else {})

    def record(self) -> dict[str, Any]:
        """Its last line."""
        known = {"ended": self.ended, "seconds": round(self.seconds, 1), "blocking": self.blocking}
        return self.names() | known | ({"error": self.error} if self.error else {})


def rounds(stages: Sequence[Stage]) -> list[list[Stage]]:
    """What runs at the same time: neighbours that check, and each of the others alone."""
    keyed = groupby(enumerate(stages), key=lambda numbered: -1 if numbered[1].checks else numbered[0])
    return [[stage for _, stage in together] for _, together in keyed]


class FirstContact:
    """Runs the stages, side by side or one after the other, and writes what each says."""

    def __init__(
        self,
        options: argparse.Namespace,
        lines: IO[str],
        log: IO[bytes],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """lines: one JSON line a figure and a process' end. log: what they write to stderr, each line behind its
        stage's name. clock_s: seconds since any moment, by which stages are given their time.
        """
        self._options = options
        self._lines = lines
        self._log = log
        self._clock_s = clock_s
        self._end_s = clock_s() + options.budget_s
        self._scale = options.budget_s / BUDGET_S
        self._lock = threading.Lock()

    def run(self) -> Iterator[list[StageRun]]:
        """Yield the run of each process, a stage's one behind the other, and its second one if the first failed."""
        together = rounds(self._options.stages)
        for number, stages in enumerate(together):
            later_s = sum(max(stage.limit_s for stage in later) for later in together[number + 1 :]) * self._scale
            parts = [(stage, part) for stage in stages for part in range(stage.parts)]
            jobs = [Job(*named, number, len(parts)) for number, named in enumerate(parts)]
            with ThreadPoolExecutor(len(jobs)) as threads:
                yield from threads.map(partial(self._attempts, later_s), jobs)

    def _attempts(self, later_s: float, job: Job) -> list[StageRun]:
        runs = [self._run(job, later_s, blocking=False)]
        if not runs[0].is_good:
            runs.append(self._run(job, later_s, blocking=True))
        return runs

    def _run(self, job: Job, later_s: float, *, blocking: bool) -> StageRun:
        limit_s = self._end_s - later_s - self._clock_s()
        run = StageRun(job.stage, job.part, "not begun", blocking=blocking, error=f"{max(limit_s, 0):.0f} s are left")
        if limit_s >= LEAST_S * self._scale:
            run = self._in_process(job, limit_s, blocking=blocking)
        self._write(run.record())
        return run

    def _in_process(self, job: Job, limit_s: float, *, blocking: bool) -> StageRun:
        started_s = self._clock_s()
        run, is_late = StageRun(job.stage, job.part, "ok", blocking=blocking), threading.Event()
        with subprocess.Popen(
            self._command(job, limit_s),
            cwd=ROOT,
            env=self._environment(job.stage, blocking=blocking),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that what it started ends with it
        ) as process:
            timer = threading.Timer(limit_s, _end_late, (process, is_late))
            listener = threading.Thread(target=self._listen, args=(run, process.stderr))
            timer.start()
            listener.start()
            try:
                for line in process.stdout or ():
                    run.figures.append({**run.names(), **json.loads(line)})
                    self._write(run.figures[-1])
                code = process.wait()
            finally:
                timer.cancel()
                timer.join()
                _kill(process)
                listener.join()
        run.seconds = self._clock_s() - started_s
        if code:
            run.ended = f"out of time after {limit_s:.0f} s" if is_late.is_set() else f"failed: {_exit(code)}"
        else:
            run.error = ""
        return run

    def _listen(self, run: StageRun, stderr: IO[bytes]) -> None:
        """Log what a process writes to stderr. Its last line is an exception's, if that ended it."""
        for line in stderr:
            with self._lock:
                self._log.write(f"{run.stage.name} {run.part}: ".encode() + line)
                self._log.flush()
            run.error = line.decode(errors="replace").strip()[:MAX_ERROR_CHARS] or run.error

    def _command(self, job: Job, limit_s: float) -> list[str]:
        options = self._options
        command = [sys.executable, "-m", MODULE, "--stage", job.stage.name, "--out", str(options.out.absolute())]
        command += ["--job", *map(str, job[1:]), "--limit-s", str(limit_s)]
        command += ["--device", options.device, *(["--tiny"] if options.tiny else [])]
        return command + [word for plant in options.plant for word in ("--plant", plant)]

    def _environment(self, stage: Stage, *, blocking: bool) -> dict[str, str]:
        environment = dict(os.environ, PYTHONUNBUFFERED="1")
        if blocking:
            environment["CUDA_LAUNCH_BLOCKING"] = "1"
        if self._options.device == "cpu" and stage.interpreted:
            environment["TRITON_INTERPRET"] = "1"
        return environment

    def _write(self, record: dict[str, Any]) -> None:
        record |= {"at": time.strftime("%H:%M:%S")}
        with self._lock:
            print(json.dumps(record), file=self._lines, flush=True)
            print(_short(record), flush=True)


def _end_late(process: subprocess.Popen[bytes], is_late: threading.Event) -> None:
    is_late.set()
    _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # all of them have ended
        process.poll()


def _exit(code: int) -> str:
    return f"exit code {code}" if code > 0 else signal.Signals(-code).name


def _short(record: dict[str, Any]) -> str:
    """A record as one line for people."""
    values = (f"{name} {value}" for name, value in record.items() if name not in ("stage", "figure"))
    return f"{record['stage']:18}{record.get('figure', '')}  " + ", ".join(values)


def table(runs: Sequence[list[StageRun]], *, is_measurement: bool) -> str:
    """A line a stage: how it ended, and the headlines of its parts."""
    lines = []
    for name, parts in groupby(runs, key=lambda attempts: attempts[0].stage.name):
        attempts = list(parts)
        words = "; ".join(word for part in attempts for word in _headlines(part))
        endings = [_ending(part) for part in attempts]
        ended = "; ".join(dict.fromkeys(ending for ending in endings if ending != "ok")) or "ok"
        seconds = max(part[0].seconds for part in attempts)
        lines.append(f"{name:18}{seconds:6.1f} s  {ended}: {words or NOT_MEASURED}")
    return "\n".join([*lines, "" if is_measurement else TRIAL])


def _headlines(attempts: Sequence[StageRun]) -> list[str]:
    return list(dict.fromkeys(each["headline"] for run in attempts for each in run.figures if "headline" in each))


def _ending(attempts: Sequence[StageRun]) -> str:
    first = attempts[0]
    ended = "ok" if first.is_good else "WRONG" if first.ended == "ok" else first.ended
    again = f" (again, blocking: {attempts[1].ended} {attempts[1].error})" if len(attempts) > 1 else ""
    return ended + again


def share_of_cores(cores: Sequence[int], number: int, total: int) -> set[int]:
    """The cores for one of `total` processes side by side, CORE_SHARES processes a core."""
    width = min(len(cores), max(2, CORE_SHARES * len(cores) // total))
    first = number * len(cores) // total
    return {cores[(first + step) % len(cores)] for step in range(width)}


def _run_stage(options: argparse.Namespace) -> None:
    """What a stage's own process does: its figures go to stdout as JSON, everything else that is printed to stderr."""
    figures = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a session of its own outlives whoever is cut off
    began_s, (part, number, total) = time.monotonic(), options.job
    os.sched_setaffinity(0, share_of_cores(sorted(os.sched_getaffinity(0)), number, total))
    planted = dict(plant.partition("=")[::2] for plant in options.plant)
    how = planted.get(options.stage)
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "hang":
        time.sleep(BUDGET_S)
    elif how is not None:
        raise RuntimeError(f"planted in {options.stage}")
    from tests.benchmarks.gpu.stages import stage_figures  # here: torch comes with it, and may fail

    parts = (part, next(stage.parts for stage in STAGES if stage.name == options.stage))
    left_s = max(options.limit_s - SPARE_S, options.limit_s / 2) - (time.monotonic() - began_s)
    place = (options.device, options.out, parts, left_s)
    for figure in stage_figures(options.stage, *place, is_tiny=options.tiny):
        print(json.dumps(figure), file=figures, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages. Returns 0; 1 if one failed or found something wrong; 2 for arguments that cannot be used."""
    options = parse(arguments)
    if options.stage:
        _run_stage(options)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    runs: list[list[StageRun]] = []
    text = ""
    with (options.out / "stages.log").open("ab") as log, (options.out / "lines.jsonl").open("w") as lines:
        for attempts in FirstContact(options, lines, log).run():
            runs.append(attempts)
            text = table(runs, is_measurement=options.device == "cuda" and not options.tiny)
            (options.out / "table.txt").write_text(text + "\n")  # each time: what is cut off keeps what it has
    print(f"\n{text}")
    return 0 if all(attempts[0].is_good for attempts in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
