"""The limits of a GPU and the goals set from them, against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.benchmarks.gpu.measure import DecodeCell, EngineLoad, StepCounts, Throughput
from tests.benchmarks.gpu.random_model import MODELS, weight_shapes
from tests.benchmarks.gpu.report import GpuResult, find_goals, goals_table, line
from tests.benchmarks.gpu.transformers_peer import Parity, PeerFigures
from tests.benchmarks.gpu.workload import GpuSizes, GpuWorkload, Limits, nano_vllm_workload, shared_prefix_workload
from tests.benchmarks.peers.floor import ModelCost, Product

# 10 weights in the layers and 4 in the head, one FLOP a pair, one element of KV a token.
SMALL = ModelCost((Product(5, 2, 1, 1),), Product(2, 2, 1, 1), 1, 1, num_experts=0, experts_per_token=0)
# Two experts of 5 weights of which a token takes one, and 2 weights that all tokens take.
EXPERTS = ModelCost((Product(1, 2, 1, 1), Product(5, 1, 2, 1)), Product(2, 2, 1, 1), 1, 1, 2, 1)

H200 = "NVIDIA H200"


def limits_of(model: str) -> Limits:
    return Limits(ModelCost.of(MODELS[model].parsed))


def test_a_step_reads_the_weights_once_and_every_key() -> None:
    limits = Limits(SMALL, bytes_per_s=4, flop_per_s=1e9)
    assert limits.decode_step_s(batch=1, kv_tokens=0) == 14 * 2 / 4
    assert limits.decode_step_s(batch=3, kv_tokens=30) == (14 + 30) * 2 / 4


def test_a_step_takes_as_long_as_its_products_if_reading_takes_less() -> None:
    limits = Limits(SMALL, bytes_per_s=4, flop_per_s=7)
    assert limits.decode_step_s(batch=3, kv_tokens=30) == 3 * 2 * 14 / 7 + 30 * 2 / 4


def test_only_experts_that_some_token_is_expected_to_choose_are_read() -> None:
    limits = Limits(EXPERTS, bytes_per_s=2, flop_per_s=1e9)
    assert limits.decode_step_s(batch=1, kv_tokens=0) == 2 + 5 + 4
    assert limits.decode_step_s(batch=2, kv_tokens=0) == 2 + 10 * 0.75 + 4


def test_a_prefill_computes_a_shared_prefix_once() -> None:
    limits = Limits(SMALL, bytes_per_s=1e9, flop_per_s=1)
    head = 2 * 4
    assert limits.prefill_s([3]) == 3 * 20 + head + 6
    assert limits.prefill_s([1, 2], shared_tokens=4) == 7 * 20 + 2 * head + 10 + (4 + 1) + (8 + 3)


def test_a_workload_is_its_prefill_and_a_step_for_each_further_token() -> None:
    limits = Limits(SMALL, bytes_per_s=2, flop_per_s=1e30)
    load = GpuWorkload("w", ((1, 2, 3), (1, 2)), (3, 2), 0.0)
    steps = (14 + 3 + 2 + 2) + (14 + 3 + 2)  # the second request has ended by then
    assert limits.workload_s(load) == pytest.approx(14 + steps)
    shared = GpuWorkload("w", ((1, 2, 3), (1, 2, 4)), (2, 2), 0.0, shared_tokens=2)
    assert limits.workload_s(shared) == pytest.approx(14 + (14 + 2 + 1 + 1 + 2))


@pytest.mark.parametrize(
    ("model", "weights_gb", "kv_kib"),
    [("Qwen3-0.6B", 1.192, 112), ("Qwen3-8B", 15.14, 144), ("Qwen3-30B-A3B", 60.44, 96)],
)
def test_the_models_read_what_their_published_shapes_say(model: str, weights_gb: float, kv_kib: float) -> None:
    assert limits_of(model).weights_bytes(10**6) / 1e9 == pytest.approx(weights_gb, rel=1e-3)
    assert limits_of(model).kv_bytes(1) == kv_kib * 1024


@pytest.mark.parametrize(
    ("model", "batch", "tokens_per_s"),
    [
        ("Qwen3-0.6B", 1, 3284),
        ("Qwen3-0.6B", 64, 31_600),
        ("Qwen3-8B", 64, 11_100),
        ("Qwen3-8B", 256, 18_400),  # bound by arithmetic
        ("Qwen3-30B-A3B", 1, 695),  # 8 experts: 6.08 GB / 4.3 TB/s + 0.1 GB of KV
        ("Qwen3-30B-A3B", 16, 1662),  # 82.4 experts: (39.8 + 1.61) GB / 4.3 TB/s
        ("Qwen3-30B-A3B", 64, 4174),  # 125.9 experts
    ],
)
def test_the_limits_at_a_context_of_1024_are_those_worked_out_before(
    model: str, batch: int, tokens_per_s: float
) -> None:
    assert batch / limits_of(model).decode_step_s(batch, batch * 1024) == pytest.approx(tokens_per_s, rel=5e-3)


def test_the_nano_vllm_workload_has_its_totals_and_its_limit() -> None:
    load = nano_vllm_workload(GpuSizes())
    assert (sum(map(len, load.prompts)), load.output_tokens) == (142_827, 133_966)
    seconds = limits_of("Qwen3-0.6B").workload_s(load)
    assert seconds == pytest.approx(3.70, abs=0.01)
    assert load.output_tokens / seconds == pytest.approx(36_200, rel=1e-3)
    again = nano_vllm_workload(GpuSizes(), trial=1)
    assert again.max_tokens == load.max_tokens
    assert list(map(len, again.prompts)) == list(map(len, load.prompts))
    assert all(new[:16] != old[:16] for new, old in zip(again.prompts, load.prompts, strict=True))


def test_the_shared_prefix_workload_shares_2000_of_2200_tokens() -> None:
    load = shared_prefix_workload(GpuSizes())
    assert len(load.prompts) == len({prompt[2000:] for prompt in load.prompts}) == 256
    assert {len(prompt) for prompt in load.prompts} == {2200}
    assert len({prompt[: load.shared_tokens] for prompt in load.prompts}) == 1
    assert load.output_tokens == 25_600


def test_a_warm_up_meets_every_length_and_no_prompt() -> None:
    load = nano_vllm_workload(GpuSizes())
    warm_up = load.warm_up(GpuSizes().max_token_id)
    assert warm_up.longest == load.longest <= 2048
    assert not {prompt[:16] for prompt in warm_up.prompts} & {prompt[:16] for prompt in load.prompts}
    assert warm_up.output_tokens == 8 * 260


@pytest.mark.parametrize(("model", "billions"), [("Qwen3-0.6B", 0.596), ("Qwen3-8B", 8.191), ("Qwen3-30B-A3B", 30.53)])
def test_the_random_weights_are_as_many_as_the_published(model: str, billions: float) -> None:
    count = sum(math.prod(shape) for shape in weight_shapes(MODELS[model].parsed).values())
    assert count / 1e9 == pytest.approx(billions, rel=1e-3)


def cell(model: str, batch: int, step_ms: float, **changes: Any) -> GpuResult:
    counts = StepCounts(400.0, 5.0, 1.0, changes.get("syncs", 1.0), 1.0, 0.0, 10.0, {})
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
