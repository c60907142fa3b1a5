"""Does what each of a GPU's first stages is about.

Without a GPU kernels run in Triton's interpreter where the stage says so, and engines on the CPU's operations: each
figure names what it ran on.
"""

from __future__ import annotations

import math
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
import triton

import kernels.cpu
import kernels.triton
from engine.engine import Engine
from engine.loading.derived_settings import usable_cores
from engine.models.placement import require_float32_sums
from engine.request import Request
from engine.sampling_params import SamplingParams
from kernels.dispatch import operation_names
from kernels.triton import launch
from kernels.triton.compilation import compile_ahead
from tests.benchmarks.gpu import __main__ as benchmark
from tests.benchmarks.gpu.report import GpuResult, as_json, line
from tests.benchmarks.gpu.sanitizers import launch_ahead, sanitizers, small_cases
from tests.benchmarks.gpu.sweeps import NO_GPU, Figures, Place, attention, blas, moe_tiles
from tests.benchmarks.gpu.transformers_peer import CASES, DTYPES, FEW_ROWS, check_parity
from tests.benchmarks.gpu.workload import Deadline, GpuSizes
from tests.benchmarks.kernel_inputs import MODELS, Case, ModelShape, Sizes
from tests.benchmarks.kernels import all_cases, check_operation, gpu_cases, measure, rate_per_s, record
from tests.benchmarks.machine import GpuTimer, measure_machine
from tests.benchmarks.operation_cases import operation_cases
from tests.kernels.aot import table
from tests.support.compiled_kernels import compiling_for, counted_compilations, on_a_new_device
from tests.support.devices import interpreter_beside_numpy
from tests.support.engines import StaticRunner, load_engine, load_static_engine, run_all
from tests.support.tiny_checkpoint import make_checkpoint

REPEATS = 20
WAIT = "called a synchronizing CUDA operation"  # PyTorch's words; it also warns that it does not find them all
COMPILED_CAPABILITY = 90  # without a GPU
TINY_KERNELS = (
    (ModelShape("tiny", 64, 4, 2, 32, 300, head_dim=32, num_experts=8, experts_per_token=2),),
    Sizes(few_tokens=8, many_tokens=40, context_tokens=64, chunk_tokens=16, penalised_tokens=20),
)
GRAPH_DTYPES = ("float32", "bfloat16")  # a process each


def stage_figures(
    name: str, device: str, out: Path, part: tuple[int, int] = (0, 1), left_s: float = math.inf, *, is_tiny: bool
) -> Figures:
    """Run one of a stage's parts, numbered from 0, of so many; one dict a figure. `ok` false: it was found wrong.
    `headline`: for the table. left_s: seconds after which nothing more is begun.
    """
    with nullcontext() if device == "cuda" else interpreter_beside_numpy():
        yield from STAGES[name](Place(torch.device(device), out, is_tiny, *part, Deadline(left_s)))


def _machine(place: Place) -> Figures:
    versions = {m.__name__: m.__version__ for m in (torch, triton, transformers)}
    versions |= {"python": platform.python_version(), "cores": str(usable_cores())}
    yield {"figure": "versions", **versions, "headline": " ".join(f"{k} {v}" for k, v in versions.items())}
    if not place.has_gpu:
        yield {"figure": "rates", "ran_on": "no GPU", "headline": f"rates {NO_GPU}"}
        return
    machine = measure_machine(GpuTimer(place.device), place.device)
    rates = {"copy_bytes_per_s": machine.copy_bytes_per_s, "matmul_flop_per_s": machine.matmul_flop_per_s}
    yield {"figure": "rates", **rates, "gpu": place.gpu, "driver": machine.driver, "headline": str(machine)}


def _compile(place: Place) -> Figures:
    """All launches in a process a core, then what they take, by the cache; without a GPU for sm_90."""
    capability = launch.compute_capability() if place.has_gpu else COMPILED_CAPABILITY
    on_device = nullcontext() if place.has_gpu else on_a_new_device(capability)
    launches = (table.launch_small,) if place.is_tiny else table.launches_on(capability)
    begin = time.perf_counter()

    def launch_all() -> None:
        for launch_some in launches:
            launch_some()

    with on_device:
        ahead = compile_ahead(launch_all, usable_cores())
    seconds = time.perf_counter() - begin
    said = f"{ahead.num_kernels} kernels in {seconds:.1f} s, {ahead.num_processes} processes"
    yield {
        "figure": "compilation",
        "ran_on": place.ran_on(f"no GPU: for sm_{capability}"),
        "seconds": round(seconds, 1),
        "cached": ahead.num_cached,
        "failures": ahead.failures,
        "ok": not ahead.failures,
        "headline": said,
    }
    if place.has_gpu:  # side by side, each would bring processes of its own for it
        launch_ahead(small_cases(), place.device)
    with compiling_for(capability) as compiled:
        launch_all()
    document = table.DOCUMENTS.get(triton.__version__)
    kept = set(document.read_text().splitlines()) if document else set()
    rows = table.markdown(table.table_rows(compiled)).splitlines()[2:]
    others = [] if place.is_tiny else [row for row in rows if row not in kept]  # small launches share no whole row
    spills = sorted({kernel.name for kernel in compiled if kernel.spill_bytes})
    yield {
        "figure": "resources",
        "kernels": len(compiled),
        "spilling": spills,
        "not_in_the_table": others,
        "table": document.name if document else "none for this triton",
        "most_registers": max(kernel.registers for kernel in compiled),
        "most_shared_bytes": max(kernel.shared_bytes for kernel in compiled),
        "ok": not spills and not others,
        "headline": f"{len(spills)} spill, {len(others)} rows differ from the kept table",
    }


def _operations(place: Place) -> Figures:
    """Each result against the reference, and the same bits every time. What nobody wrote is NaN."""
    require_float32_sums()
    repeats = 2 if place.is_tiny else REPEATS
    dtype = torch.bfloat16 if place.has_gpu else torch.float32  # the interpreter computes bfloat16 wrongly
    all_cases = operation_cases(dtype, is_tiny=place.is_tiny)
    missing = {*operation_names()} - {case.operation for case in all_cases} - {"pack"}  # others begin with it
    cases = all_cases[place.part :: place.num_parts]
    del all_cases  # some GB
    launch_ahead(cases, place.device)
    if place.has_gpu:  # fresh memory is NaN, and the largest number in integers
        torch.use_deterministic_algorithms(True, warn_only=True)
    wrong: list[str] = []
    left_out: list[str] = []
    for case in cases:
        if place.deadline.left_s <= 0:
            left_out.append(case.name)
            continue
        found = check_operation(case, kernels.triton, place.device, repeats)
        wrong += [] if found["ok"] else [case.name]
        yield {"figure": case.name, "ran_on": place.ran_on("Triton's interpreter"), **found}
    good = f"{len(cases) - len(wrong) - len(left_out)} of {len(cases)} as the reference, {repeats} times the same bits"
    yield {
        "figure": "all",
        "without_a_case": sorted(missing),
        "not_reached": left_out,
        "ok": not missing and not left_out,
        "headline": f"{good}{''.join(f', WRONG {name}' for name in wrong)}",
    }


def _parity(place: Place) -> Figures:
    """One family in one dtype."""
    (family, shape), dtype = [(case, dtype) for case in CASES for dtype in DTYPES][place.part]
    sizes = GpuSizes.tiny() if place.is_tiny else GpuSizes()
    found = GpuResult("parity", family, None, check_parity(family, shape, dtype, sizes, place.device))
    yield {**_figure(found), "ran_on": place.ran_on("CPU operations"), "ok": not found.differs}


def _figure(result: GpuResult) -> dict[str, Any]:
    record = as_json(None, [result], {"is_measurement": False})["results"][0]
    return {"figure": record.pop("section"), **record, "headline": " ".join(line(result).split())}


def _model(name: str, *sections: str) -> Callable[[Place], Figures]:
    """Figures of the whole engine's benchmark."""

    def run(place: Place) -> Figures:
        batches = [] if place.is_tiny else ["--batch", "256", "--batch", "64"]
        wanted = [word for section in sections for word in ("--only", section)]
        tiny = ["--tiny"] if place.is_tiny else []
        arguments = ["--model", name, "--graphs", *wanted, *batches, "--device", place.device.type, *tiny]
        machine = benchmark.describe_machine(place.device)
        with tempfile.TemporaryDirectory(prefix="millrace-gpu-") as folder:
            measured = benchmark.GpuRun(benchmark.parse(arguments), machine, Path(folder), place.deadline).measure()
            for result in measured:
                figure = {**_figure(result), "ran_on": place.ran_on("CPU operations"), "ok": result.figure is not None}
                yield figure if place.has_gpu or result.figure is None else figure | {"headline": NO_GPU}

    return run


def _requests(prefix: str) -> list[Request]:
    """Greedy and drawn, of lengths that take several blocks, several chunks and one token."""
    params = [
        SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=0.8, top_k=20, top_p=0.9, seed=7, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True),
    ]
    lengths = (1, 5, 16, 33, 120, 60)
    return [
        Request(f"{prefix}{i}", tuple(range(3 + i, 3 + i + n)), params[i % len(params)]) for i, n in enumerate(lengths)
    ]


def _tokens(engine: Engine, prefix: str) -> dict[str, list[int]]:
    outputs = run_all(engine, _requests(prefix))
    return {name.removeprefix(prefix): list(out.completions[0].token_ids) for name, out in outputs.items()}


def _graphs(place: Place) -> Figures:
    """The same tokens with graphs and without, in float32: in bfloat16, where splits of other lengths round to other
    likeliest tokens, their share. And the calls in which the host waited, by PyTorch's own warnings.
    """
    dtype = GRAPH_DTYPES[place.part]
    settings = {"engine.device": place.device.type, "engine.dtype": dtype, **FEW_ROWS}
    with tempfile.TemporaryDirectory(prefix="millrace-graphs-") as folder:
        path = make_checkpoint(Path(folder), "qwen3_moe", head_dim=64)
        eager = load_engine(path, {**settings, "engine.cuda_graphs.enabled": "off"})
        expected = _tokens(eager, "eager")
        replayed = load_engine(path, settings) if place.has_gpu else load_static_engine(path, StaticRunner(), settings)
        _tokens(replayed, "first")
        before = replayed.stats().num_steps
        with warnings.catch_warnings(record=True) as said, _sync_warnings(place):
            warnings.simplefilter("always")
            found = _tokens(replayed, "graphs")
        num_steps = replayed.stats().num_steps - before
        waits = sorted({str(warning.message)[:200] for warning in said if WAIT in str(warning.message)})
        stats = replayed.model_interface.status().decode_graphs
    pairs = [pair for name in expected for pair in zip(found[name], expected[name], strict=True)]
    share = sum(ours == theirs for ours, theirs in pairs) / len(pairs)
    yield {
        "figure": "graphs",
        "ran_on": place.ran_on("CPU operations, steps over static buffers"),
        "ok": (share == 1 or dtype != "float32") and stats is not None and stats.num_replays > 0 and not waits,
        "dtype": dtype,
        "same_tokens": share,
        "replays": stats.num_replays if stats else 0,
        "steps": num_steps,
        "waits": waits if place.has_gpu else NO_GPU,
        "headline": f"{dtype}: {100 * share:.0f} % the same tokens, {stats.num_replays if stats else 0} replays",
    }


@contextmanager
def _sync_warnings(place: Place) -> Iterator[None]:
    """PyTorch warns of calls in which the host waits for a stream, not of events, for which the engine waits."""
    if place.has_gpu:
        torch.cuda.set_sync_debug_mode("warn")
    yield
    if place.has_gpu:
        torch.cuda.set_sync_debug_mode("default")


def _warm_up(place: Place) -> Figures:
    """What is compiled while requests run, of everything that the sampler can be asked for."""
    with tempfile.TemporaryDirectory(prefix="millrace-warm-up-") as folder, counted_compilations() as compiled:
        path = make_checkpoint(Path(folder), "qwen3_moe", head_dim=64)
        begin = time.perf_counter()
        engine = load_engine(path, {"engine.device": place.device.type, "engine.max_num_seqs": "16"})
        seconds, at_start = time.perf_counter() - begin, len(compiled)
        del compiled[:]
        _tokens(engine, "")
    yield {
        "figure": "warm-up",
        "ran_on": place.ran_on("CPU operations, which compile nothing"),
        "ok": not compiled,
        "load_s": round(seconds, 1),
        "at_start": at_start,
        "later": list(compiled),
        "headline": f"{at_start} compiled at start, {len(compiled)} later" if place.has_gpu else NO_GPU,
    }


# What is asked first of the kernel benchmark: goals of attention and of expert layers, groups of rows that share a
# prefix, which decide a default, what nobody has timed, and the other goals but those of rare activations.
WANTED: tuple[Callable[[Case], bool], ...] = (
    lambda case: case.goal_percent is not None and ("+" in case.operation or "attention" in case.operation),
    lambda case: "shared by" in case.shape and "decode" in case.operation,
    lambda case: "float8" in case.shape or "int" in case.shape,
    lambda case: case.goal_percent is not None and case.operation not in ("gelu_and_mul", "clamped_swiglu"),
    lambda case: "shared by" in case.shape,
    lambda case: case.operation in ("store_and_decode", "grouped_gemm"),
)


def _kernels(place: Place) -> Figures:
    """The kernel benchmark's cases, the most wanted first, as long as there is time."""
    machine = benchmark.describe_machine(place.device)
    made = gpu_cases(kernels.triton, MODELS, Sizes()) if place.has_gpu else all_cases(kernels.cpu, *TINY_KERNELS)
    cases = sorted(made, key=_rank)

    def launch_all() -> None:
        for case in (case for case in cases if _rank(case) < len(WANTED)):
            with suppress(Exception):  # a seam: it is raised again where the case is timed
                work = case.prepare(place.device)
                for run in (work.run, *work.libraries.values()):
                    run()

    if place.has_gpu:
        compile_ahead(launch_all, usable_cores())
    goals: list[bool] = []
    left_out = 0
    for case in cases:
        if place.deadline.left_s <= 0:
            left_out += 1
            continue
        found = measure(case, place.device, place.median_us)
        torch.cuda.empty_cache()
        percent = found.percent(rate_per_s(machine, found)) if place.has_gpu else None
        told = {"figure": case.operation, "ran_on": place.ran_on("CPU operations"), **record(machine, found)}
        told |= {"percent": percent}
        if percent is not None and case.goal_percent is not None:
            goals.append(percent >= case.goal_percent)
            name = f"{case.operation.partition('+')[0]} {case.shape}"
            told["headline"] = f"{name}: {percent:.1f} % of {case.bound}, goal {case.goal_percent:.0f}"
        yield told | {"ok": not found.error}
    said = f"{len(cases) - left_out} of {len(cases)} cases, {sum(goals)} of {len(goals)} goals met"
    yield {"figure": "all", "left_out": left_out, "headline": said if place.has_gpu else NO_GPU}


def _rank(case: Case) -> int:
    return next((rank for rank, is_wanted in enumerate(WANTED) if is_wanted(case)), len(WANTED))


STAGES: Mapping[str, Callable[[Place], Figures]] = {
    "machine": _machine,
    "compile": _compile,
    "operations": _operations,
    "parity": _parity,
    "graphs": _graphs,
    "warm-up": _warm_up,
    "sanitizers": sanitizers,
    "Qwen3-0.6B": _model("Qwen3-0.6B", "decode", "prefill", "nano-vllm"),
    "Qwen3-8B": _model("Qwen3-8B", "decode", "prefill"),
    "Qwen3-30B-A3B": _model("Qwen3-30B-A3B", "decode", "prefill"),
    "kernels": _kernels,
    "moe-tiles": moe_tiles,
    "attention": attention,
    "blas": blas,
}
