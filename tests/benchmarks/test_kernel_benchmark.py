"""The kernel benchmark: its cases on tiny shapes with the CPU's operations; only times need a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kernels import cpu, reference
from kernels.dispatch import operation_names
from kernels.native.operations import Bfloat16Operations
from tests.benchmarks import machine
from tests.benchmarks.attention_cases import float8_cache_cases
from tests.benchmarks.kernel_inputs import MODELS, Case, ModelShape, Sizes, Workload, beside
from tests.benchmarks.kernels import all_cases, as_table, cpu_cases, main, measure, measure_all, parse
from tests.benchmarks.layer_cases import cpu_product_cases
from tests.benchmarks.machine import Checkout, Machine

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
TINY = (
    ModelShape("dense", 64, 4, 2, 96, 300, head_dim=32),
    ModelShape("experts", 64, 4, 2, 32, 300, head_dim=32, num_experts=8, experts_per_token=2, qk_norm=False),
)
SMALL = Sizes(few_tokens=8, many_tokens=40, context_tokens=64, chunk_tokens=16, penalised_tokens=20)
MACHINE = Machine("GPU", "1", "13", "2", "3", Checkout("abc", True), 4e12, 8e14, 2.0, "by a clock")
NATIVE = Bfloat16Operations.__module__


def in_order_of(values: float) -> Callable[..., float]:
    """A clock: our run takes 4 us, the libraries' one after the other less."""
    times: Iterator[float] = iter((values, values / 2, values / 4))

    def median_us(run: Callable[[], object], restore: Callable[[], None] | None = None) -> float:
        run()
        return next(times)

    return median_us


def fake_case(run: Callable[[], torch.Tensor], **libraries: Callable[[], torch.Tensor]) -> Case:
    return Case("argmax", "m", "s", "bandwidth", lambda device: Workload(8_000_000, "8 MB", run, libraries), 60.0)


def test_without_a_gpu_it_says_so_in_one_line_and_returns_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 1
    assert capsys.readouterr() == ("", "no CUDA GPU: nothing was measured\n")


@pytest.mark.parametrize("arguments", [["--jsn"], ["--json", "/nowhere/x.json"], ["--only", "softmax"]])
def test_arguments_that_cannot_be_used_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        parse(arguments)
    assert exited.value.code == 2
    assert arguments[-1].removesuffix("/x.json") in capsys.readouterr().err


def test_every_operation_has_a_case_for_every_model() -> None:
    cases = list(all_cases(cpu, MODELS, Sizes()))
    measured = {name for case in cases for name in case.operation.split("+")}
    assert measured == set(operation_names()) - {"pack"}  # which runs once, at load
    for model in MODELS:
        assert any(model.name in case.models and case.operation == "paged_decode_attention" for case in cases)
    goals = {case.operation.split("+")[0] for case in cases if case.goal_percent is not None}
    assert {"paged_decode_attention", "paged_prefill_attention", "route_topk", "rms_norm", "silu_and_mul"} <= goals


def test_all_that_is_native_is_measured_on_a_cpu() -> None:
    natively = {name for name in operation_names() if getattr(Bfloat16Operations, name).__module__ == NATIVE}
    run_others = {"moe_small_batch", "route_and_sort", "store_and_decode", "add_experts_rms_norm"}
    assert {case.operation for case in cpu_cases(cpu)} == natively - run_others - {"pack"}


@pytest.mark.parametrize("case", list(cpu_product_cases(cpu, TINY)), ids=lambda c: f"{c.operation}-{c.shape}-{c.bound}")
def test_on_a_cpu_each_side_has_inputs_of_its_own(case: Case) -> None:
    work = beside(case, case).prepare(CPU)
    assert work.amount > 0
    (theirs,) = work.libraries.values()
    ours, others = work.run(), theirs()
    assert ours.shape == others.shape
    assert not torch.equal(ours, others)


@pytest.mark.parametrize(
    "case",
    [*all_cases(cpu, TINY, SMALL), *float8_cache_cases(reference, TINY, SMALL)],
    ids=lambda c: f"{c.operation.split('+')[0]}-{c.models}-{c.shape}",
)
def test_a_library_call_does_the_same_as_the_operation_it_is_compared_with(case: Case) -> None:
    torch.manual_seed(0)
    work = case.prepare(CPU)
    assert work.amount > 0
    assert work.formula
    found = work.run().clone()
    assert found.numel() > 0
    for name, library in work.libraries.items():
        if work.restore is not None:
            work.restore()
        if name == "flash varlen":  # CUDA only
            continue
        expected = library()
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        if "drawn" not in case.shape:  # ours and the library's draw differently
            torch.testing.assert_close(found.float(), expected.float(), rtol=0.05, atol=0.05)


def test_the_percentage_is_of_the_fastest_library_call() -> None:
    case = fake_case(lambda: torch.ones(1), slow=lambda: torch.ones(1), fast=lambda: torch.ones(1))
    measurement = measure(case, CPU, in_order_of(4.0))
    assert (measurement.time_us, measurement.library, measurement.library_us) == (4.0, "fast", 1.0)
    assert measurement.ratio == 0.25
    assert measurement.percent(4e12) == pytest.approx(50.0)  # 8 MB in 4 us are 2 TB/s
    assert "50.0% bandwidth  60% missed" in as_table(MACHINE, [measurement])


def test_what_fails_is_reported_and_costs_nothing_else() -> None:
    def fail() -> torch.Tensor:
        raise RuntimeError("no such kernel\nlong text")

    ours, theirs = (
        measure(case, CPU, in_order_of(4.0)) for case in (fake_case(fail), fake_case(lambda: torch.ones(1), x=fail))
    )
    assert ours.error == "RuntimeError: no such kernel"
    assert theirs.failed_libraries == {"x": "RuntimeError: no such kernel"}
    assert theirs.ratio is None
    table = as_table(MACHINE, [ours, theirs])
    assert "failed: argmax s: RuntimeError: no such kernel" in table
    assert "library failed: argmax s: x: RuntimeError" in table


def test_all_cases_end_in_one_table_and_one_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> torch.Tensor:
        raise RuntimeError("no such kernel")

    good, bad = fake_case(lambda: torch.ones(1)), fake_case(fail)
    path = tmp_path / "out.json"
    assert measure_all([good, bad], CPU, lambda run, restore: (run(), 4.0)[1], MACHINE, path) == 1
    written = json.loads(path.read_text())
    assert written["machine"]["checkout"] == {"commit": "abc", "dirty": True}
    assert [record["percent"] for record in written["measurements"]] == [pytest.approx(50.0), None]
    assert "50.0% bandwidth" in capsys.readouterr().out
    assert measure_all([good], CPU, lambda run, restore: 4.0, MACHINE, None) == 0


class FakeEvent:
    """Each pair lies one millisecond further apart than the one before."""

    pairs = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def elapsed_time(self, _end: FakeEvent) -> float:
        FakeEvent.pairs += 1
        return float(FakeEvent.pairs)


def test_a_time_is_the_median_of_many_runs_each_restored_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "FLUSH_BYTES", 1024)
    monkeypatch.setattr(machine, "MAX_RUNS", 11)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timer = machine.GpuTimer(CPU)
    calls: list[str] = []
    FakeEvent.pairs = 0
    assert timer.median_us(lambda: calls.append("run"), lambda: calls.append("restore")) == 6000.0
    assert calls == ["restore", "run"] * (11 + machine.WARM_UP_RUNS)


def test_the_limits_of_the_machine_come_from_its_own_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "COPY_BYTES", 1024)
    monkeypatch.setattr(machine, "MATMUL_SIZE", 16)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")

    class Timer:
        def median_us(self, run: Callable[[], object]) -> float:
            run()
            return 2.0

    found = machine.measure_machine(Timer(), CPU)
    assert found.copy_bytes_per_s == pytest.approx(1024e6)
    assert found.matmul_flop_per_s == pytest.approx(16**3 * 1e6)
    assert (found.gpu, found.event_floor_us, found.torch) == ("H200", 2.0, torch.__version__)
