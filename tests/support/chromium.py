"""A headless Chromium that opens a page, waits for its scripts, and shows what became of it."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

TIMEOUT_S = 60.0
# Nothing but the page: no sandbox (we may be root), no GPU, nothing that calls home.
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip


@dataclass(frozen=True)
class Page:
    """What was on the screen: as HTML, and as a picture."""

    html: str
    screenshot: Path

    @property
    def text(self) -> str:
        """The words of the page, without scripts and styles."""
        return _Text.of(self.html)


def chromium_executable() -> str | None:
    """Debian's, or whatever this machine calls it."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def look_at(url: str, screenshot: Path, *, size: tuple[int, int] = (1400, 900), scripts_ms: int = 5_000) -> Page:
    """Open `url` in a browser of its own; its scripts have `scripts_ms` of their time, which passes as fast as it can.

    Answers of servers are waited for whatever the clock says. Raises subprocess.CalledProcessError or TimeoutExpired.
    """
    executable = chromium_executable()
    assert executable is not None
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        command = [executable, *_OPTIONS, f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}"]
        command += [f"--virtual-time-budget={scripts_ms}", f"--screenshot={screenshot}", "--dump-dom", url]
        done = subprocess.run(command, capture_output=True, check=True, timeout=TIMEOUT_S)
    return Page(done.stdout.decode(), screenshot)


class _Text(HTMLParser):
    """Collects text."""

    def __init__(self) -> None:
        super().__init__()
        self._hidden = 0
        self._words: list[str] = []

    @classmethod
    def of(cls, html: str) -> str:
        parser = cls()
        parser.feed(html)
        return " ".join(" ".join(parser._words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self._words.append(data)
