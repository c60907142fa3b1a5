from __future__ import annotations

from typing import Any

import pytest

from tests.benchmarks.gpu.decode_cell import DecodeCell
from tests.benchmarks.gpu.engine_load import EngineLoad
from tests.benchmarks.gpu.gpu_goal import find_goals
from tests.benchmarks.gpu.gpu_report import goals_table, line
from tests.benchmarks.gpu.gpu_result import GpuResult
from tests.benchmarks.gpu.parity import Parity
from tests.benchmarks.gpu.peer_figures import PeerFigures
from tests.benchmarks.gpu.step_counts import StepCounts
from tests.benchmarks.gpu.throughput import Throughput

H200 = "NVIDIA H200"


def cell(model: str, batch: int, step_ms: float, **changes: Any) -> GpuResult:
    counts = StepCounts(400.0, 5.0, 1.0, changes.get("syncs", 1.0), 1.0, 0.0)
    times = (step_ms, step_ms * 2, step_ms)
    figure = DecodeCell(batch, 1024.0, times, 6.0, changes.get("allocations", 0.0), 1.0, counts)
    return GpuResult("decode", model, changes.get("graphs", True), figure)


def run(seconds: float) -> GpuResult:
    return GpuResult("nano-vllm", "Qwen3-0.6B", True, Throughput(seconds, 130_000, 1100, 0, 0, 3.7))


def found(results: list[GpuResult], gpu: str | None = H200) -> list[tuple[float | None, bool | None]]:
    return [(goal.value, goal.is_met) for goal in find_goals(results, gpu)]


def test_every_goal_is_not_measured_until_it_is() -> None:
    assert found([]) == [(None, None)] * 5
    assert found([cell("Qwen3-8B", 16, 7.5)])[0] == (None, None)  # another batch
    failed = GpuResult("nano-vllm", "Qwen3-0.6B", True, None, "OutOfMemoryError: out of memory")
    assert found([failed])[2] == (None, None)
    assert goals_table(find_goals([], None)).count("not measured") == 5


def test_goals_that_are_met() -> None:
    results = [cell("Qwen3-8B", 64, 7.5), cell("Qwen3-30B-A3B", 64, 8.0), run(6.0), run(4.0), run(5.0)]
    assert found(results) == [(80.0, True), (75.0, True), (26_000.0, True), (0.0, True), (1.0, True)]


def test_goals_that_are_missed_by_the_worst_cell() -> None:
    slow = [cell("Qwen3-8B", 64, 9.0), run(5.1)]
    waits = [cell("Qwen3-0.6B", 1, 9.0, syncs=2.0), cell("Qwen3-0.6B", 16, 9.0, allocations=0.0625)]
    assert [met for _, met in found(slow + waits)] == [False, None, False, False, False]


def test_steps_without_graphs_allocate_as_they_like() -> None:
    eager = cell("Qwen3-8B", 64, 7.5, graphs=False, allocations=300.0, syncs=3.0)
    assert found([eager])[3:] == [(None, None)] * 2
    assert found([eager])[0] == (80.0, True)  # the speed counts whichever way it was reached


def test_another_gpu_has_figures_and_no_verdict() -> None:
    assert found([run(5.0)], "NVIDIA H100")[2] == (26_000.0, None)


@pytest.mark.parametrize(
    ("dtype", "same", "max_error", "mean_error", "holds"),
    [
        ("float32", 1.0, 1e-3, 1e-4, True),
        ("float32", 0.99, 1e-3, 1e-4, False),
        ("float32", 1.0, 3e-3, 1e-4, False),
        ("bfloat16", 0.95, 0.2, 0.015, True),
        ("bfloat16", 0.8, 0.2, 0.015, False),
        ("bfloat16", 0.95, 0.2, 0.03, False),
        ("bfloat16", 0.95, float("nan"), float("nan"), False),
    ],
)
def test_float32_must_be_exact_and_bfloat16_as_close_as_transformers(
    dtype: str, same: float, max_error: float, mean_error: float, holds: bool
) -> None:
    theirs = 0.0 if dtype == "float32" else 0.01
    assert Parity("qwen3", dtype, 192, same, 0.97, max_error, mean_error, theirs).holds is holds


def test_every_kind_of_figure_is_a_line() -> None:
    assert "80.0        1     400        5     1       1      0" in line(cell("Qwen3-8B", 64, 7.5))
    assert "26,000" in line(run(5.0))
    load = EngineLoad(8.04, 60_440_000_000, 25_800_000_000, 16_403, 23, 1, None)
    assert "8.0 s; weights 60.44 GB, KV 25.80 GB in 16,403 blocks, 23 graphs captured, 1 not" in line(
        GpuResult("load", "Qwen3-30B-A3B", True, load)
    )
    peer = PeerFigures("5.23.0", "sdpa", 60.0, 30_000, 12, 256)
    assert "500 tok/s; 12 of 256 requests ended" in line(GpuResult("peer", "Qwen3-0.6B", None, peer))
    assert line(GpuResult("decode", "Qwen3-8B", False, None, "EngineFatal: x")).endswith(
        "off     failed: EngineFatal: x"
    )
