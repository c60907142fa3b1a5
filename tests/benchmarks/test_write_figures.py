from __future__ import annotations

import json
from pathlib import Path

from tests.benchmarks.write_figures import write_figures


def test_figures_say_when_and_how_they_were_made(tmp_path: Path) -> None:
    write_figures(tmp_path / "a.json", "scaling", ["--only", "own prompt tokens"], {"points": [1]})
    figures = json.loads((tmp_path / "a.json").read_text())
    assert figures["command"] == "python -m tests.benchmarks.scaling --only 'own prompt tokens'"
    assert len(figures["date"]) == len("2026-01-31")
    assert figures["points"] == [1]
