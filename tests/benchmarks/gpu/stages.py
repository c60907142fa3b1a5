"""Does what each of a GPU's first stages is about, and makes one small launch of each kernel for a sanitizer.

`python -m tests.benchmarks.gpu.stages CASE` is such a launch. Without a GPU kernels run in Triton's interpreter where
the stage says so, and engines on the CPU's operations: each figure names what it ran on.
"""

from __future__ import annotations

import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import transformers
import triton

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
from tests.benchmarks.gpu.report import as_json, line
from tests.benchmarks.gpu.sweeps import NO_GPU, Figures, Place, blas, decode_attention, moe_tiles
from tests.benchmarks.gpu.workload import Deadline
from tests.benchmarks.kernels import check_operation
from tests.benchmarks.machine import GpuTimer, measure_machine
from tests.benchmarks.operation_cases import operation_cases
from tests.kernels.aot import table
from tests.support.compiled_kernels import compiling_for, counted_compilations, on_a_new_device
from tests.support.devices import interpreter_beside_numpy
from tests.support.engines import StaticRunner, load_engine, load_static_engine, run_all
from tests.support.tiny_checkpoint import make_checkpoint

REPEATS = 20
COMPILED_CAPABILITY = 90  # without a GPU
MODEL_S = 70.0  # of the stage's process, which is ended at its own limit


def stage_figures(name: str, device: str, out: Path, *, is_tiny: bool) -> Figures:
    """Run a stage; one dict a figure. `ok` false: it was found wrong. `headline`: for the table."""
    with nullcontext() if device == "cuda" else interpreter_beside_numpy():
        yield from STAGES[name](Place(torch.device(device), out, is_tiny))


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
    if place.has_gpu:  # fresh memory is NaN, and the largest number in integers
        torch.use_deterministic_algorithms(True, warn_only=True)
    repeats = 2 if place.is_tiny else REPEATS
    dtype = torch.bfloat16 if place.has_gpu else torch.float32  # the interpreter computes bfloat16 wrongly
    good, cases = 0, operation_cases(dtype, is_tiny=place.is_tiny)
    for case in cases:
        found = check_operation(case, kernels.triton, place.device, repeats)
        good += found["ok"]
        yield {"figure": case.name, "ran_on": place.ran_on("Triton's interpreter"), **found}
    missing = {*operation_names()} - {case.operation for case in cases} - {"pack"}  # others begin with it
    yield {
        "figure": "all",
        "without_a_case": sorted(missing),
        "ok": not missing,
        "headline": f"{good} of {len(cases)} as the reference, {repeats} times the same bits",
    }


def _benchmark(place: Place, *arguments: str) -> Figures:
    """Figures of the whole engine's benchmark."""
    tiny = ["--tiny"] if place.is_tiny else []
    options = benchmark.parse([*arguments, "--device", place.device.type, *tiny])
    machine = benchmark.describe_machine(place.device)
    with tempfile.TemporaryDirectory(prefix="millrace-gpu-") as folder:
        for result in benchmark.GpuRun(options, machine, Path(folder), Deadline(MODEL_S)).measure():
            figure = as_json(machine, [result], {"is_measurement": False})["results"][0]
            counts = place.has_gpu or figure["section"] == "parity" or result.figure is None
            yield {
                "figure": figure.pop("section"),
                "ran_on": place.ran_on("CPU operations"),
                **figure,
                "ok": result.figure is not None and not result.differs,
                "headline": " ".join(line(result).split()) if counts else NO_GPU,
            }


def _model(name: str, *sections: str) -> Callable[[Place], Figures]:
    def run(place: Place) -> Figures:
        batches = [] if place.is_tiny else ["--batch", "256", "--batch", "64"]
        wanted = [word for section in sections for word in ("--only", section)]
        yield from _benchmark(place, "--model", name, "--graphs", *wanted, *batches)

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
    """The same tokens with graphs and without; and the calls in which the host waited, by PyTorch's own warnings."""
    settings = {"engine.device": place.device.type, "engine.dtype": "bfloat16" if place.has_gpu else "float32"}
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
        waits = sorted({str(warning.message)[:200] for warning in said if "synchroniz" in str(warning.message)})
        stats = replayed.model_interface.status().decode_graphs
    same = found == expected
    yield {
        "figure": "graphs",
        "ran_on": place.ran_on("CPU operations, steps over static buffers"),
        "ok": same and stats is not None and stats.num_replays > 0 and not waits,
        "same_tokens": same,
        "replays": stats.num_replays if stats else 0,
        "steps": num_steps,
        "waits": waits if place.has_gpu else NO_GPU,
        "headline": f"{'same' if same else 'OTHER'} tokens, {stats.num_replays if stats else 0} replays",
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


def small_launches() -> list[str]:
    """Names of the cases that together launch every kernel."""
    return [case.name for case in operation_cases(torch.float16, is_tiny=True) if case.operation != "linear"]


STAGES: Mapping[str, Callable[[Place], Figures]] = {
    "machine": _machine,
    "compile": _compile,
    "operations": _operations,
    "parity": lambda place: _benchmark(place, "--only", "parity"),
    "graphs": _graphs,
    "warm-up": _warm_up,
    "Qwen3-0.6B": _model("Qwen3-0.6B", "decode", "nano-vllm"),
    "Qwen3-8B": _model("Qwen3-8B", "decode"),
    "Qwen3-30B-A3B": _model("Qwen3-30B-A3B", "decode"),
    "moe-tiles": moe_tiles,
    "decode-attention": decode_attention,
    "blas": blas,
}


def main() -> None:
    """Launch the case that the argument names, once, on the GPU."""
    (case,) = [case for case in operation_cases(torch.float16, is_tiny=True) if case.name == sys.argv[1]]
    case.run(kernels.triton, torch.device("cuda"))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
