"""Writing and reading the little of Markdown that our documents use."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# A span may go on in the next line of its paragraph.
_SPAN = re.compile(r"`([^`\n]+(?:\n[^`\n]+)*)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Piece:
    """Some text of a document, and the line it begins in, counted from 1."""

    text: str
    line: int


@dataclass(frozen=True)
class Markdown:
    """A document's text, and what is code in it."""

    text: str

    @property
    def fenced(self) -> list[tuple[str, Piece]]:
        """Blocks between ``` with their language, which may be empty."""
        return [(match[1], self._piece(match, 2)) for match in _FENCE.finditer(self.text)]

    @property
    def prose(self) -> str:
        """The text with an empty line for each line of a fenced block."""
        return _FENCE.sub(lambda match: "\n" * match[0].count("\n"), self.text)

    @property
    def spans(self) -> Iterator[Piece]:
        """What stands between single backticks, on one line."""
        for match in _SPAN.finditer(self.prose):
            yield Piece(" ".join(match[1].split()), self._line(match.start(1)))

    @property
    def links(self) -> Iterator[Piece]:
        """Where links lead."""
        for match in _LINK.finditer(_SPAN.sub(lambda span: "-" * len(span[0]), self.prose)):
            yield Piece(match[1], self._line(match.start(1)))

    @property
    def anchors(self) -> set[str]:
        """What GitHub calls the headings."""
        titles = (match[1].lower() for match in _HEADING.finditer(self.prose))
        return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}

    def _piece(self, match: re.Match[str], group: int) -> Piece:
        return Piece(match[group], self.text.count("\n", 0, match.start(group)) + 1)

    def _line(self, offset_in_prose: int) -> int:
        return self.prose.count("\n", 0, offset_in_prose) + 1


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; `|` in a cell is escaped, a line's end is a space."""
    lines = [head, ["---"] * len(head), *rows]
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def plain(text: str) -> str:
    """Text as it stands: outside of code nothing in it is markup."""
    parts = text.split("`")
    return "`".join(
        part if index % 2 else re.sub(r"(\*|<(?=[/a-zA-Z]))", r"\\\1", part) for index, part in enumerate(parts)
    )


def page(title: str, *parts: str) -> str:
    """A page that `make pages` writes."""
    note = "<!-- Written by `make pages` from the code; edit that. -->"
    return "\n\n".join([note, f"# {title}", *parts]) + "\n"
