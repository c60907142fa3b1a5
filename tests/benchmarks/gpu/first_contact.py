"""Runs everything that a GPU's first ten minutes must answer, stage by stage: `--out DIRECTORY`, see `--help`.

Each stage is a process with its own time, whose figures are written, one JSON line each, as they come. A stage that
fails, dies or hangs costs itself alone; it is run again with CUDA_LAUNCH_BLOCKING=1, so that the second error names the
kernel. What a stage leaves of its time is there for those after it, and no stage takes a later one's.

`--sanitize` is the second command: compute-sanitizer over one small launch of each kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[3]
MODULE = "tests.benchmarks.gpu.first_contact"

BUDGET_S = 600.0
LEAST_S = 5.0  # a stage that would get less is not begun
TRIAL = "no GPU or tiny shapes: no figure is a measurement"
NOT_MEASURED = "not measured"
MAX_ERROR_CHARS = 300


@dataclass(frozen=True)
class Stage:
    """A process of its own, and the seconds it has at least."""

    name: str
    limit_s: float
    about: str
    interpreted: bool = False  # without a GPU: in Triton's interpreter


# Together the budget. What decides whether anything else can be believed comes first, then figures, then choices.
STAGES = (
    Stage("machine", 25, "versions, rate of a copy and of a product"),
    Stage("compile", 100, "every launch, in parallel; registers, spills and shared memory against the kept table"),
    Stage("operations", 75, "every operation against the reference, padding NaN, 20 times the same bits", True),
    Stage("parity", 45, "tiny models against transformers, float32 and bfloat16"),
    Stage("graphs", 35, "tokens with graphs and without, waits of the host in a step"),
    Stage("warm-up", 30, "what is compiled after the warm-up: nothing"),
    Stage("Qwen3-0.6B", 75, "decode at 64 and 256, nano-vllm's workload"),
    Stage("Qwen3-8B", 55, "decode at 64 and 256"),
    Stage("Qwen3-30B-A3B", 70, "decode at 64 and 256"),
    Stage("moe-tiles", 45, "tiles of the experts' products", True),
    Stage("decode-attention", 35, "tile, stages and splits of decode attention", True),
    Stage("blas", 10, "cuBLAS or cuBLASLt for products without a bias"),
)
TOOLS = ("memcheck", "racecheck")


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
    parser.add_argument("--sanitize", action="store_true", help="compute-sanitizer over a small launch of each kernel")
    parser.add_argument("--stage", choices=names, help=argparse.SUPPRESS)  # what a stage's own process is told
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


@dataclass
class StageRun:
    """How a stage went, and what it said."""

    stage: Stage
    ended: str  # "ok", or how it failed
    seconds: float
    blocking: bool = False  # with CUDA_LAUNCH_BLOCKING=1
    error: str = ""
    figures: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether it came to its end and nothing that it checked was wrong."""
        return self.ended == "ok" and all(figure.get("ok", True) for figure in self.figures)

    def record(self) -> dict[str, Any]:
        """Its last line."""
        known = {"stage": self.stage.name, "ended": self.ended, "seconds": round(self.seconds, 1)}
        return known | {"blocking": self.blocking} | ({"error": self.error} if self.error else {})


class FirstContact:
    """Runs the stages one after the other and writes what each says."""

    def __init__(
        self,
        options: argparse.Namespace,
        lines: IO[str],
        log: IO[bytes],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """lines: one JSON line a figure and a stage's end. log: what the stages write to stderr. clock_s: seconds since
        any moment, by which stages are given their time.
        """
        self._options = options
        self._lines = lines
        self._log = log
        self._clock_s = clock_s
        self._end_s = clock_s() + options.budget_s
        self._scale = options.budget_s / BUDGET_S

    def run(self) -> Iterator[list[StageRun]]:
        """Yield each stage's run, and its second one if the first failed."""
        stages = self._options.stages
        for number, stage in enumerate(stages):
            later_s = sum(later.limit_s for later in stages[number + 1 :]) * self._scale
            runs = [self._run(stage, later_s, blocking=False)]
            if not runs[0].is_good:
                runs.append(self._run(stage, later_s, blocking=True))
            yield runs

    def _run(self, stage: Stage, later_s: float, *, blocking: bool) -> StageRun:
        limit_s = self._end_s - later_s - self._clock_s()
        run = StageRun(stage, "not begun", 0.0, blocking, f"{max(limit_s, 0):.0f} s are left for it")
        if limit_s >= LEAST_S * self._scale:
            run = self._in_process(stage, limit_s, blocking=blocking)
        self._write(run.record())
        return run

    def _in_process(self, stage: Stage, limit_s: float, *, blocking: bool) -> StageRun:
        started_s, offset = self._clock_s(), self._log.tell()
        run, is_late = StageRun(stage, "ok", 0.0, blocking), threading.Event()
        with subprocess.Popen(
            self._command(stage),
            cwd=ROOT,
            env=self._environment(stage, blocking=blocking),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,  # so that what it started ends with it
        ) as process:
            timer = threading.Timer(limit_s, _end_late, (process, is_late))
            timer.start()
            try:
                for line in process.stdout or ():
                    run.figures.append({"stage": stage.name, **json.loads(line)})
                    self._write(run.figures[-1])
                code = process.wait()
            finally:
                timer.cancel()
                timer.join()
                _kill(process)
        run.seconds = self._clock_s() - started_s
        if code:
            run.ended = f"out of time after {limit_s:.0f} s" if is_late.is_set() else f"failed: {_exit(code)}"
            run.error = self._last_words(offset)
        return run

    def _command(self, stage: Stage) -> list[str]:
        options = self._options
        command = [sys.executable, "-m", MODULE, "--stage", stage.name, "--out", str(options.out.absolute())]
        command += ["--device", options.device, *(["--tiny"] if options.tiny else [])]
        return command + [word for plant in options.plant for word in ("--plant", plant)]

    def _environment(self, stage: Stage, *, blocking: bool) -> dict[str, str]:
        environment = dict(os.environ, PYTHONUNBUFFERED="1")
        if blocking:
            environment["CUDA_LAUNCH_BLOCKING"] = "1"
        if self._options.device == "cpu" and stage.interpreted:
            environment["TRITON_INTERPRET"] = "1"
        return environment

    def _last_words(self, offset: int) -> str:
        """The last line of what the stage wrote to stderr: an exception's, if that ended it."""
        with open(self._log.name, "rb") as log:
            log.seek(offset)
            said = log.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(said) if line.strip()), "")[:MAX_ERROR_CHARS]

    def _write(self, record: dict[str, Any]) -> None:
        record |= {"at": time.strftime("%H:%M:%S")}
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
    """A line a stage: how it ended, and its headline."""
    lines = []
    for attempts in runs:
        first = attempts[0]
        told = [figure["headline"] for run in attempts for figure in run.figures if "headline" in figure]
        words = "; ".join(dict.fromkeys(told)) if first.is_good or told else NOT_MEASURED
        again = f" (again, blocking: {attempts[1].ended} {attempts[1].error})" if len(attempts) > 1 else ""
        ended = "ok" if first.is_good else "WRONG" if first.ended == "ok" else first.ended
        lines.append(f"{first.stage.name:18}{first.seconds:6.1f} s  {ended}{again}: {words}")
    return "\n".join([*lines, "" if is_measurement else TRIAL])


def _run_stage(options: argparse.Namespace) -> None:
    """What a stage's own process does: its figures go to stdout as JSON, everything else that is printed to stderr."""
    figures = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    planted = dict(plant.partition("=")[::2] for plant in options.plant)
    how = planted.get(options.stage)
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "hang":
        time.sleep(BUDGET_S)
    elif how is not None:
        raise RuntimeError(f"planted in {options.stage}")
    from tests.benchmarks.gpu.stages import stage_figures  # here: torch comes with it, and may fail

    for figure in stage_figures(options.stage, options.device, options.out, is_tiny=options.tiny):
        print(json.dumps(figure), file=figures, flush=True)


def sanitizer_commands(names: Sequence[str]) -> list[list[str]]:
    """compute-sanitizer's command lines: each tool over one small launch of each kernel's operation."""
    launch = [sys.executable, "-m", "tests.benchmarks.gpu.stages"]
    options = ["--error-exitcode", "9", "--launch-timeout", "60", "--print-limit", "20"]
    return [["compute-sanitizer", "--tool", tool, *options, *launch, name] for tool in TOOLS for name in names]


def _sanitize(options: argparse.Namespace, log: IO[bytes]) -> int:
    from tests.benchmarks.gpu.stages import small_launches

    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer: not found on PATH", file=sys.stderr)
        return 1
    # Each of torch's allocations by itself, or a launch that writes past one lands in the next unseen.
    environment = dict(os.environ, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    end, num_bad = time.monotonic() + options.budget_s, 0
    for command in sanitizer_commands(small_launches()):
        left_s = end - time.monotonic()
        try:
            code = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=max(left_s, 0.1), check=False
            ).returncode
            ended = "ok" if code == 0 else f"FOUND SOMETHING (exit code {code})"
        except subprocess.TimeoutExpired:
            ended = "out of time"
        num_bad += ended != "ok"
        print(f"{command[2]:10}{command[-1]:28}{ended}", flush=True)
    return 1 if num_bad else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages. Returns 0; 1 if one failed or found something wrong; 2 for arguments that cannot be used."""
    options = parse(arguments)
    if options.stage:
        _run_stage(options)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "stages.log").open("ab") as log:
        if options.sanitize:
            return _sanitize(options, log)
        with (options.out / "lines.jsonl").open("w") as lines:
            runs = list(FirstContact(options, lines, log).run())
    text = table(runs, is_measurement=options.device == "cuda" and not options.tiny)
    (options.out / "table.txt").write_text(text + "\n")
    print(f"\n{text}")
    return 0 if all(attempts[0].is_good for attempts in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
