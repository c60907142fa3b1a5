"""The README is true where a machine can tell."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def test_every_figure_is_filled_in() -> None:
    assert not re.findall(r"^[A-Z_]{4,}$", README.read_text(), flags=re.MULTILINE)


def test_every_folder_it_names_exists() -> None:
    for name in re.findall(r"`(\w+/(?:\w+\.md)?)`", README.read_text()):
        assert (README.parent / name).exists(), name
