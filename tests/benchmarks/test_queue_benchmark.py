"""The benchmarks of the queue and of large jobs, and the files their figures go to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.large_job import large_lines, measure
from tests.benchmarks.large_job import parse as parse_large_job
from tests.benchmarks.large_job_part import peak_rss_mib, rss_mib
from tests.benchmarks.machine import write_figures
from tests.benchmarks.queue import QueueMeasurement, as_table, main, parse, queue_lines
from tests.support.registry import OpenShard, idle_waits
from tests.support.request_lines import parse as parse_line


def _measurement(num_workers: int, total_s: float) -> QueueMeasurement:
    return QueueMeasurement(
        num_workers=num_workers,
        num_prompts=1000,
        planning_s=0.5,
        total_s=total_s,
        worker_cpu_s=0.3,
        redis_cpu_s=0.02,
        submit_cpu_s=0.01,
        submit_redis_cpu_s=0.005,
        results_cpu_s=0.04,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--workers", "0"],
        ["--repeats", "0"],
        ["--prompts", "3"],
        ["--json", "/nowhere/at/all.json"],
        ["--workers", "1", "2", "--waits"],
    ],
)
def test_bad_arguments_end_the_queue_benchmark_with_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse(arguments)
    assert end.value.code == 2
    assert arguments[0] in capsys.readouterr().err.splitlines()[-1]


def test_the_table_has_the_median_for_each_number_of_workers() -> None:
    rows = as_table(
        [_measurement(1, 2.0), _measurement(1, 1.0), _measurement(1, 4.0), _measurement(2, 2.0)]
    ).splitlines()
    assert rows[2].split(" | ")[:3] == ["| 1", "500 (250 - 1000)", "500"]
    assert rows[3].split(" | ")[:3] == ["| 2", "250", "500"]
    assert rows[3].split(" | ")[5] == "300"


def test_its_lines_are_good_ones() -> None:
    lines = [parse_line(raw, index) for index, raw in enumerate(queue_lines(20))]
    assert len({line.custom_id for line in lines}) == 20
    assert len({line.endpoint for line in lines}) == 2


def test_a_shard_waits_beside_a_slot_that_it_may_have() -> None:
    full = [OpenShard(f"held-{number}", "a", "w", 0) for number in range(7)]
    waits, other = OpenShard("waits", "a", "", 0), OpenShard("other", "b", "", 0)
    assert idle_waits([waits], ["w"], 8) == {"waits"}
    assert idle_waits([*full[:6], waits], ["w"], 8) == {"waits"}
    assert idle_waits([*full, waits, other], ["w"], 8) == {"other"}  # the last slot is for a tenant that has none
    assert idle_waits([*full, waits], ["w", "idle"], 8) == {"waits"}


def test_a_shard_that_runs_alone_waits_for_a_worker_that_runs_nothing() -> None:
    suspect, innocent = OpenShard("suspect", "a", "", 1), OpenShard("innocent", "a", "", 0)
    busy, alone = OpenShard("busy", "a", "w", 0), OpenShard("alone", "a", "w", 1)
    assert idle_waits([suspect, busy], ["w"], 8) == set()
    assert idle_waits([suspect, innocent, busy], ["w", "idle"], 8) == {"suspect"}
    assert idle_waits([innocent, alone], ["w"], 8) == set()


@pytest.mark.slow
def test_waits_are_measured_on_real_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "waits.json"
    arguments = ["--waits", "--rule", "tenants", "--prompts", "600", "--workers", "2", "--repeats", "2"]
    assert main([*arguments, "--json", str(report)]) in (0, 1)  # how long is for a quiet machine to say
    runs = json.loads(report.read_text())["runs"]
    assert len(runs) == 2
    assert all(run["num_looks"] > 0 and run["total_s"] > 0 for run in runs)
    assert "tenants: 2 runs" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_takes_every_prompt_through_a_real_worker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "queue.json"
    assert main(["--prompts", "300", "--workers", "1", "--repeats", "1", "--json", str(report)]) == 0
    (measurement,) = json.loads(report.read_text())["measurements"]
    assert measurement["num_prompts"] == 300
    assert 0 < measurement["planning_s"] < measurement["total_s"]
    assert measurement["worker_cpu_s"] > 0
    assert "| 1 |" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--lines", "0"], ["--lines", "50001"], ["--line-bytes", "100000"]])
def test_bad_arguments_end_the_large_job_with_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse_large_job(arguments)
    assert end.value.code == 2
    assert arguments[0] in capsys.readouterr().err.splitlines()[-1]


def test_its_lines_are_good_ones_of_about_the_size_asked_for() -> None:
    raw = list(large_lines(20, 4000))
    lines = [parse_line(line, index) for index, line in enumerate(raw)]
    assert len({line.prompt_key() for line in lines}) == 20
    assert all(3900 < len(line) < 4100 for line in raw)


def test_a_process_has_at_most_its_peak() -> None:
    assert 10 < rss_mib() <= peak_rss_mib()


@pytest.mark.slow
def test_a_run_takes_every_line_through_a_real_worker(tmp_path: Path) -> None:
    figures = measure(tmp_path, num_lines=200, line_bytes=1000)
    assert 190_000 < figures.input_bytes < 210_000
    assert min(figures.accepted_s, figures.planned_s, figures.run_s, figures.downloaded_s) > 0
    for before, peak in (figures.producer_mib, figures.planner_mib, figures.worker_mib, figures.reader_mib):
        assert 10 < before <= peak
    rows = figures.as_table().splitlines()
    assert [row.split(" | ")[0] for row in rows[3:]] == ["| accepted", "| planned", "| run", "| downloaded"]


def test_figures_say_when_and_how_they_were_made(tmp_path: Path) -> None:
    write_figures(tmp_path / "a.json", "scaling", ["--only", "own prompt tokens"], {"points": [1]})
    figures = json.loads((tmp_path / "a.json").read_text())
    assert figures["command"] == "python -m tests.benchmarks.scaling --only 'own prompt tokens'"
    assert len(figures["date"]) == len("2026-01-31")
    assert figures["points"] == [1]
