from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.queue import main, parse
from tests.benchmarks.queue_lines import queue_lines
from tests.benchmarks.queue_measurement import QueueMeasurement
from tests.benchmarks.queue_report import as_table
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
    "arguments", [["--workers", "0"], ["--repeats", "0"], ["--prompts", "3"], ["--json", "/nowhere/at/all.json"]]
)
def test_arguments_that_cannot_be_used_end_it_with_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse(arguments)
    assert end.value.code == 2
    assert arguments[0] in capsys.readouterr().err.splitlines()[-1]


def test_the_table_has_a_row_for_each_number_of_workers_and_the_median_of_its_runs() -> None:
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


@pytest.mark.slow
def test_a_run_takes_every_prompt_through_a_real_worker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "queue.json"
    assert main(["--prompts", "300", "--workers", "1", "--repeats", "1", "--json", str(report)]) == 0
    (measurement,) = json.loads(report.read_text())["measurements"]
    assert measurement["num_prompts"] == 300
    assert 0 < measurement["planning_s"] < measurement["total_s"]
    assert measurement["worker_cpu_s"] > 0
    assert "| 1 |" in capsys.readouterr().out
