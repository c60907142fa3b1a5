"""The pages that are written from the code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tests.pages.commands_page import commands_page
from tests.pages.metrics_page import metrics_page
from tests.pages.settings_page import settings_page

ROOT = Path(__file__).resolve().parents[2]

PAGES: Mapping[str, Callable[[], str]] = {
    "settings/SETTINGS.md": settings_page,
    "worker/METRICS.md": metrics_page,
    "worker/COMMANDS.md": commands_page,
}


def stale_pages(root: Path = ROOT) -> dict[str, str]:
    """Pages that are not there or not what the code says, with what they should be."""
    wanted = {name: write() for name, write in PAGES.items()}
    return {name: text for name, text in wanted.items() if _text(root / name) != text}


def _text(path: Path) -> str | None:
    return path.read_text() if path.exists() else None
