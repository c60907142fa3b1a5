"""The names in engine/EXTENDING.md are those of the source."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("engine", "kernels", "worker", "settings", "tests")


def test_every_name_is_one_of_the_source() -> None:
    spans = set(re.findall(r"`([^`\n]+)`", (ROOT / "engine" / "EXTENDING.md").read_text()))
    names = {span.split(".")[-1] for span in spans if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", span)} - {"md", "py"}
    sources = (path.read_text() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    words = {word for source in sources for word in re.findall(r"\w+", source)}
    assert names - words == set()
    assert len(names) > 40
