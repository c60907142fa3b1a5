"""Describes the machine and the commit that a benchmark measured, and times what runs there.

That is: what a GPU can do at best, the time of work on it without the host's share and with an empty cache, CPU time of
other processes, and what a hypervisor took of the CPUs. Figures are written to files that say how they were made.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Protocol, Self

import torch
import triton

from engine.loading.derived_settings import usable_cores
from kernels import cpu
from tests.support.processes import redis_executable

ROOT = Path(__file__).resolve().parents[2]

COPY_BYTES = 2**30
MATMUL_SIZE = 8192
CPU_MATMUL_SIZE = 1024

FLUSH_BYTES = 512 * 2**20  # eight times the L2 of an H200 (60 MB), which it replaces before each run
MIN_RUNS, MAX_RUNS = 10, 100
BUDGET_S = 0.5  # of GPU time for the runs of one measurement
WARM_UP_RUNS = 3  # the first compiles

FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")
UNITS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16"}  # flag -> what multiplies bfloat16, the fastest first

PACKAGES = ("celery", "redis", "pydantic", "tokenizers")


@dataclass(frozen=True)
class Checkout:
    """The commit that is checked out, and whether the source differs from it."""

    commit: str  # "unknown" outside a git checkout
    dirty: bool | None  # whether tracked files differ from the commit; None where that is unknown

    @classmethod
    def read(cls) -> Checkout:
        """Read the checkout that this file is in."""
        changed = command_output(["git", "status", "--porcelain", "--untracked-files=no"])
        commit = command_output(["git", "rev-parse", "HEAD"])
        return cls(commit or "unknown", None if changed is None else bool(changed))

    def __str__(self) -> str:
        return f"commit {self.commit}{', with changes' if self.dirty else ''}"


def command_output(command: Sequence[str]) -> str | None:
    """What the command prints when run in the checkout; None if it fails or does not exist."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


class _Timer(Protocol):
    def median_us(self, run: Callable[[], object]) -> float: ...


@dataclass(frozen=True)
class Machine:
    """A GPU, the software on it, and its measured limits."""

    gpu: str
    driver: str
    cuda: str
    torch: str
    triton: str
    checkout: Checkout
    copy_bytes_per_s: float  # read and written, together
    matmul_flop_per_s: float  # bfloat16
    event_floor_us: float  # what a run of nothing takes: part of every time below
    timing: str  # how a time is taken

    def __str__(self) -> str:
        return (
            f"{self.gpu}, driver {self.driver}, CUDA {self.cuda}, torch {self.torch}, triton {self.triton}\n"
            f"{self.checkout}\n"
            f"copy {self.copy_bytes_per_s / 1e9:,.1f} GB/s, product {self.matmul_flop_per_s / 1e9:,.0f} GFLOP/s"
        )


def measure_machine(timer: _Timer, device: torch.device) -> Machine:
    """Read the versions and measure the limits."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_us = timer.median_us(lambda: target.copy_(source))
    left, right = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device).bfloat16() for _ in range(2))
    matmul_us = timer.median_us(lambda: left @ right)
    return Machine(
        gpu=torch.cuda.get_device_name(device),
        driver=command_output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) or "unknown",
        cuda=torch.version.cuda or "unknown",
        torch=torch.__version__,
        triton=triton.__version__,
        checkout=Checkout.read(),
        copy_bytes_per_s=2 * COPY_BYTES / (copy_us / 1e6),
        matmul_flop_per_s=2 * MATMUL_SIZE**3 / (matmul_us / 1e6),
        event_floor_us=timer.median_us(lambda: None),
        timing="median between two CUDA events, L2 emptied before each run",
    )


class GpuTimer:
    """Measures with CUDA events around each run.

    Before each run a buffer is overwritten: that empties the L2, and it keeps the GPU busy for as long as the host
    needs to enqueue the run, so that launch times of the host are not measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._flush_buffer = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        self._flush_s = 0.0
        self._flush_s = self.median_us(self._flush_buffer.zero_) / 1e6

    def median_us(self, run: Callable[[], object], restore: Callable[[], None] | None = None) -> float:
        """Median of many runs, in microseconds; restore goes before each run, outside the time."""
        host_s, total_s = 0.0, 0.0
        for _ in range(WARM_UP_RUNS):
            _call(restore)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run()
            host_s = time.perf_counter() - begin
            torch.cuda.synchronize()
            total_s = time.perf_counter() - begin
        # A run that waits for the GPU on the host cannot be hidden, so no more than 20 passes are tried.
        passes = min(1 + math.ceil(1.5 * host_s / self._flush_s), 20) if self._flush_s else 1
        num_runs = min(max(int(BUDGET_S / max(total_s, 1e-6)), MIN_RUNS), MAX_RUNS)
        events = [(_event(), _event()) for _ in range(num_runs)]
        for start, end in events:
            _call(restore)
            for _ in range(passes):
                self._flush_buffer.zero_()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(float(start.elapsed_time(end)) for start, end in events) * 1000


class CpuTimer:
    """Measures on a CPU, with its caches emptied before each run: the best of many, since others run as well.

    With one thread it is the thread's processor time, which leaves out what others take; with more, time that passed.
    """

    FLUSH_BYTES = 64 * 2**20  # twice the last cache of an EPYC's eight cores

    def __init__(self) -> None:
        self._clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        self._flush_buffer = torch.empty(self.FLUSH_BYTES, dtype=torch.uint8)

    def median_us(self, run: Callable[[], object], restore: Callable[[], None] | None = None) -> float:
        """Best of at least 10 runs, in microseconds; named as GpuTimer's, in whose place it stands."""
        best_s, end = math.inf, time.perf_counter() + 2 * BUDGET_S
        for index in itertools.count():
            _call(restore)
            self._flush_buffer.add_(1)
            begin = self._clock()
            run()
            best_s = min(best_s, self._clock() - begin)
            if index >= MIN_RUNS and time.perf_counter() > end:
                break
        return best_s * 1e6


def measure_cpu(timer: CpuTimer) -> Machine:
    """This CPU in the place of a GPU: its features as the driver, and its measured limits."""
    about = PeersMachine.read()
    source = torch.empty(COPY_BYTES // 8, dtype=torch.uint8)
    target = torch.empty_like(source)
    x = torch.randn(CPU_MATMUL_SIZE, CPU_MATMUL_SIZE).bfloat16()
    weight = cpu.pack(torch.randn(CPU_MATMUL_SIZE, CPU_MATMUL_SIZE).bfloat16())
    threads = torch.get_num_threads()
    clock = "processor time of one thread" if threads == 1 else f"wall time of {threads} threads"
    return Machine(
        gpu=f"{about.cpu}, {torch.get_num_threads()} of {about.num_cpus} CPUs, load before {about.load:.1f}",
        driver=" ".join(about.features),
        cuda="none",
        torch=about.torch,
        triton="none",
        checkout=about.checkout,
        copy_bytes_per_s=2 * source.nbytes / (timer.median_us(lambda: target.copy_(source)) / 1e6),
        matmul_flop_per_s=2 * CPU_MATMUL_SIZE**3 / (timer.median_us(lambda: cpu.linear(x, weight)) / 1e6),
        event_floor_us=timer.median_us(lambda: None),
        timing=f"{clock}, best of 10 or more, caches emptied before each run",
    )


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types here


def _call(action: Callable[[], None] | None) -> None:
    if action is not None:
        action()


@dataclass(frozen=True)
class PeersMachine:
    """The CPU and its features, and the source: what decides the figures of an engine on a CPU."""

    cpu: str
    num_cpus: int
    unit: str  # that multiplies bfloat16: AMX, AVX512-BF16 or none
    features: tuple[str, ...]  # of those that decide how fast a type is
    load: float  # runnable processes over the minute before
    torch: str
    checkout: Checkout

    @classmethod
    def read(cls) -> PeersMachine:
        """Read this machine. Linux only."""
        info = Path("/proc/cpuinfo").read_text()
        flags = _value(info, "flags").split()
        return cls(
            cpu=_value(info, "model name"),
            num_cpus=usable_cores(),
            unit=next((name for flag, name in UNITS.items() if flag in flags), "none"),
            features=tuple(name for name in FEATURES if name in flags),
            load=os.getloadavg()[0],
            torch=torch.__version__,
            checkout=Checkout.read(),
        )

    def __str__(self) -> str:
        return (
            f"{self.cpu}, {self.num_cpus} CPUs ({' '.join(self.features)}; bfloat16 unit: {self.unit}), load before "
            f"{self.load:.2f}\n"
            f"torch {self.torch}, {self.checkout}"
        )


def _value(info: str, wanted: str) -> str:
    """The value of the first line of /proc/cpuinfo with that name; "" if there is none."""
    for line in info.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == wanted:
            return value.strip()
    return ""


@dataclass(frozen=True)
class QueueMachine:
    """The CPU and the software that the queue runs on."""

    cpu: str
    num_cpus: int  # workers, Redis and producer share them
    load: float  # runnable processes over the minute before
    versions: str
    checkout: Checkout

    @classmethod
    def read(cls) -> QueueMachine:
        """Read this machine."""
        server = command_output([redis_executable(), "--version"]) or "unknown"
        packages = ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)
        return cls(
            cpu=_value(Path("/proc/cpuinfo").read_text(), "model name") or platform.machine(),
            num_cpus=len(os.sched_getaffinity(0)),
            load=os.getloadavg()[0],
            versions=f"Python {platform.python_version()}, {server.partition(' sha')[0]}, {packages}",
            checkout=Checkout.read(),
        )

    def __str__(self) -> str:
        return f"{self.cpu}, {self.num_cpus} CPUs, load before {self.load:.2f}; {self.versions}\n{self.checkout}"


@dataclass(frozen=True)
class CpuTicks:
    """Time of all CPUs since boot, in steps of 10 ms. Linux only.

    While the hypervisor runs others ("steal" of proc(5)), a virtual machine stands still and its clock goes on: the
    same trial took 12.7 s with nothing taken, 15.5 with 7 % and 22.7 with 20 %.
    """

    total: int
    stolen: int

    @classmethod
    def read(cls, stat: Path = Path("/proc/stat")) -> Self:
        """Read the counters as they are now."""
        # user nice system idle iowait irq softirq steal; guests' time, which follows, is in user's already
        fields = [int(field) for field in stat.read_text().splitlines()[0].split()[1:9]]
        return cls(sum(fields), fields[7])

    def stolen_share(self, before: CpuTicks) -> float:
        """The share of all CPUs' time since `before` that the hypervisor took, 0 to 1."""
        return (self.stolen - before.stolen) / max(self.total - before.total, 1)


def cpu_time_s(pids: Iterable[int]) -> float:
    """User and system time of these processes so far, all threads together, in steps of 10 ms. Linux only."""
    return sum(_ticks(pid) for pid in pids) / os.sysconf("SC_CLK_TCK")


def _ticks(pid: int) -> int:
    # The name, in brackets, may hold blanks; utime and stime are fields 14 and 15 of proc(5).
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def write_figures(path: Path, module: str, arguments: Sequence[str] | None, figures: Mapping[str, object]) -> None:
    """Write the figures as JSON, after the day (UTC) and the command that made them.

    module: the benchmark's name below `tests.benchmarks`; arguments: its command line, None for this process' own.
    """
    given = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "-m", f"tests.benchmarks.{module}", *given])
    about = {"date": datetime.now(UTC).date().isoformat(), "command": command}
    path.write_text(json.dumps(about | dict(figures), indent=1) + "\n")
