"""The committed plots show the committed figures."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.plots.__main__ import BENDS, RESULTS, SHOWN, Bar, FigureFile, plots

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


def test_at_most_eight_bars_say_in_words_who_is_faster(drawn: dict[str, str]) -> None:
    ratios = [FigureFile.read(RESULTS / f"{name}.json").comparison(workload)["ratio"] for name, workload in SHOWN]
    said = [text for text in texts(drawn["peers.svg"]) if text.endswith(" times faster")]

    assert len(said) == len(SHOWN) <= 8
    for text, ratio in zip(said, ratios, strict=True):
        times = float(text.split()[-3])
        assert text.startswith("Millrace") == (ratio < 1), text
        assert times == pytest.approx(max(ratio, 1 / ratio), rel=0.05), text


@pytest.mark.parametrize(
    ("speed", "words"),
    [(2.17, "Millrace 2.2 times faster"), (1.06, "Millrace 1.06 times faster"), (0.4, "vLLM 2.5 times faster")],
)
def test_words_give_two_digits_or_three_where_two_would_flatter(speed: float, words: str) -> None:
    assert Bar("dense", "vLLM", speed, (speed,)).words == words


def test_every_line_has_a_sentence_on_its_bend(drawn: dict[str, str]) -> None:
    said = " ".join(texts(drawn["scaling.svg"]) + texts(drawn["sharing.svg"]))
    for sentence in BENDS.values():
        assert sentence in said


def test_the_sentences_on_bends_are_true_of_the_figures() -> None:
    figures = FigureFile.read(RESULTS / "scaling.json").figures
    costs = {axis: [point["us_per_token"] for point in figures["points"] if point["axis"] == axis] for axis in BENDS}
    works = {
        axis: [point["flop"] / point["num_tokens"] for point in figures["points"] if point["axis"] == axis]
        for axis in BENDS
    }
    peaks = [look["peak_bytes"] for look in FigureFile.read(RESULTS / "memory.json").figures["memories"]]

    few, *many = costs["requests"]
    assert max(many) < 1.2 * min(many) < few
    assert costs["output tokens"] == sorted(costs["output tokens"])
    for axis in ("prompt tokens", "own prompt tokens"):
        rates = [cost / work for cost, work in zip(costs[axis], works[axis], strict=True)]
        assert max(rates) < 1.6 * min(rates), axis
    assert works["prompt tokens"][-1] > 2 * works["prompt tokens"][0]
    assert max(peaks) < 1.4 * min(peaks)


def test_plots_show_no_hash(drawn: dict[str, str]) -> None:
    commits = {FigureFile.read(path).figures["machine"]["checkout"]["commit"] for path in RESULTS.glob("*.json")}
    shown = "\n".join(text for svg in drawn.values() for text in texts(svg))
    assert [commit for commit in commits if commit[:7] in shown] == []


def test_figures_name_machine_commit_day_and_command() -> None:
    for path in sorted(RESULTS.glob("*.json")):
        file = FigureFile.read(path)
        assert "2 CPUs" in file.machine, path
        assert file.figures["date"] in file.origin, path
        assert len(file.figures["machine"]["checkout"]["commit"]) == 40, path
        assert file.figures["command"].startswith("python -m tests.benchmarks."), path
        assert "/tmp" not in file.figures["command"], path


def test_figures_of_a_gpu_name_it_day_versions_commits_and_commands() -> None:
    paths = sorted(RESULTS.glob("gpu/*.json"))
    assert paths
    for path in paths:
        figures = FigureFile.read(path).figures
        assert {"gpu", "driver", "torch", "triton"} <= figures["machine"].keys(), path
        assert len(figures["date"]) == len("2026-11-26"), path
        assert all(run["commit"] and run["command"] for run in figures["runs"]), path


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"scaling\.json"):
        list(plots(tmp_path))
