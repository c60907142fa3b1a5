"""The benchmark of how time and memory grow with requests, prompts and outputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.scaling.__main__ import main, memory_table, points_table
from tests.benchmarks.scaling.measure import AXES, Axis, ScalingPoint, WaitingMemory, exponent, measure, memory_of_run
from tests.support.tiny_checkpoint import make_checkpoint

POINTS = [ScalingPoint("prompt tokens", size, size * 10, 1e-4 * size**1.5, 1e3 * size) for size in (100, 400, 1600)]
MEMORIES = [WaitingMemory("worker", 1000, 100_000_000, 120_000_000), WaitingMemory("worker", 3000, 1, 122_000_000)]


def test_the_exponent_of_a_power_is_the_power() -> None:
    assert exponent([1, 10, 100], [3, 3, 3]) == pytest.approx(0)
    assert exponent([1, 2, 8], [5 * size**1.5 for size in (1, 2, 8)]) == pytest.approx(1.5)


def test_a_superlinear_term_shows_in_the_table() -> None:
    lines = points_table(POINTS).splitlines()
    assert lines[2] == "| 100 | 1000 | 0.100 | 100.0 |  |  |"
    assert lines[3] == "| 400 | 4000 | 0.800 | 200.0 | 2.00 | 1.00 |"
    assert lines[-1] == (
        "exponent of prompt tokens: all: time 1.50, arithmetic 1.00; last two: time 1.50, arithmetic 1.00"
    )


def test_memory_a_request_is_against_the_fewest_waiting() -> None:
    assert memory_table(MEMORIES).splitlines()[-1] == "| worker | 3000 | 0 | 122 | 1000 |"


def test_the_axes_cover_what_they_should() -> None:
    assert [(axis.name, axis.sizes[0], axis.sizes[-1]) for axis in AXES] == [
        ("requests", 16, 1024),
        ("prompt tokens", 128, 4096),
        ("output tokens", 16, 512),
        ("own prompt tokens", 16, 512),
    ]
    assert [axis.workload(100).num_requests for axis in AXES] == [100, 16, 32, 64]


def test_requests_of_the_last_axis_share_all_but_their_own_tokens() -> None:
    load = AXES[-1].workload(16)
    prompts = load.prompts(seed=0)
    assert {len(prompt) for prompt in prompts} == {512}
    assert len({tuple(prompt[:496]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 64
    assert load.num_prefill_tokens == 496 + 64 * 16


def test_every_size_is_measured(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    axis = Axis("output tokens", (2, 4), AXES[2].workload)
    points = measure(model, [axis], rounds=1)
    assert [(point.size, point.num_tokens) for point in points] == [(2, 32 * 66), (4, 32 * 68)]
    assert all(point.seconds > 0 for point in points)
    assert points[0].flop < points[1].flop


@pytest.mark.slow
def test_memory_is_read_while_requests_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.benchmarks.scaling.measure.SETTLE_S", 0.0)
    memory = memory_of_run(make_checkpoint(tmp_path / "model"), 200)
    assert 50e6 < memory.resident_bytes <= memory.peak_bytes


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--json", "/nowhere/at/all.json"], ["--only", "luck"]])
def test_arguments_that_cannot_be_used_end_it_with_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert arguments[0] in capsys.readouterr().err.splitlines()[-1]
