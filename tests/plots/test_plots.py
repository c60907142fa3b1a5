"""The committed plots show the committed figures."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.plots.__main__ import RESULTS, FigureFile, plots

TEXT = "{http://www.w3.org/2000/svg}text"


def shapes(svg: str) -> list[str]:
    """Every kind of line, bar and mark, in the order they are drawn; their numbers differ by the version of NumPy."""
    return [element.tag for element in ElementTree.fromstring(svg).iter()]


def texts(svg: str) -> list[str]:
    """Every label, number and line of origin, in the order they are drawn."""
    return ["".join(element.itertext()) for element in ElementTree.fromstring(svg).iter(TEXT)]


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    return dict(plots(RESULTS))


def test_each_plot_that_is_kept_is_what_the_script_draws_now(drawn: dict[str, str]) -> None:
    kept = {path.name: path.read_text() for path in RESULTS.glob("*.svg")}
    assert kept.keys() == drawn.keys()
    for name, svg in drawn.items():
        assert texts(kept[name]) == texts(svg), f"{name} is out of date: python -m tests.plots"
        assert shapes(kept[name]) == shapes(svg), f"{name} is out of date: python -m tests.plots"


def test_text_takes_the_colour_of_the_page(drawn: dict[str, str]) -> None:
    for svg in drawn.values():
        assert "prefers-color-scheme:dark" in svg
        assert "fill: currentColor" in svg or 'fill="currentColor"' in svg


def test_every_comparison_of_every_file_has_its_bars(drawn: dict[str, str]) -> None:
    shown = texts(drawn["peers.svg"])
    ratios = [
        f"blue takes {comparison['ratio']:.2f} times as long"
        for path in sorted(RESULTS.glob("peers_*.json"))
        for comparison in FigureFile.read(path).figures["comparisons"]
    ]
    assert len(ratios) >= 5
    assert [text.strip() for text in shown if "times as long" in text] == ratios


def test_figures_name_machine_commit_day_and_command() -> None:
    for path in sorted(RESULTS.glob("*.json")):
        file = FigureFile.read(path)
        assert "2 CPUs" in file.machine, path
        assert file.figures["date"] in file.origin, path
        assert file.commit in file.origin, path
        assert file.command.startswith("python -m tests.benchmarks."), path
        assert "/tmp" not in file.command, path


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"scaling\.json"):
        list(plots(tmp_path))
