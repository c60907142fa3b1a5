from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.large_job import measure, parse
from tests.benchmarks.large_lines import large_lines
from tests.benchmarks.process_memory import peak_rss_mib, rss_mib
from tests.support.request_lines import parse as parse_line


@pytest.mark.parametrize("arguments", [["--lines", "0"], ["--lines", "50001"], ["--line-bytes", "100000"]])
def test_arguments_that_cannot_be_used_end_it_with_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse(arguments)
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
