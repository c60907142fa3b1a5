"""The README's own code, so that tests run what users copy."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"


def python_block(after: str) -> str:
    """The first fenced Python block of the README behind the words `after`."""
    text = README.read_text()
    start = text.index(after)
    match = re.search(r"```python\n(.*?)```", text[start:], re.DOTALL)
    assert match is not None, f"no Python block after {after!r}"
    return match[1]


def replace_line(code: str, begins_with: str, line: str) -> str:
    """`code` with the one line that begins so replaced."""
    pattern = re.compile(rf"^{re.escape(begins_with)}.*$", re.MULTILINE)
    assert len(pattern.findall(code)) == 1, f"not one line begins with {begins_with!r}"
    return pattern.sub(lambda _: line, code)
