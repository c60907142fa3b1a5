"""Finds names in documents that do not exist: modules, paths, settings, metrics, commands, links."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import click
import redis

from settings import load_settings
from settings.entries import PROFILE_VARIABLE
from worker.cli.main import cli
from worker.metrics.catalogue import METRICS, SERVER_METRICS

_VARIABLE = re.compile(r"\bMILLRACE_[A-Z0-9_]*[A-Z0-9]\b")
_METRIC = re.compile(r"\bmillrace_[a-z0-9_]*[a-z0-9](?P<open>_?\*)?")
_COMMAND = re.compile(r"(?:^|(?<=[\s;|&($]))millrace[ \t]+(?P<name>[a-z][\w-]*)(?P<rest>[^;|&)#\n]*)", re.MULTILINE)
_OPTION = re.compile(r"(?:^|(?<=\s))(--[a-z][\w-]*|-[a-zA-Z])(?=[\s=]|$)")
_OPTION_ALONE = re.compile(r"(--[a-z][\w-]+)([= ].*)?")
_MAKE = re.compile(r"(?:^|(?<=[\s;|&(]))make[ \t]+(?P<name>[a-z][\w-]*)", re.MULTILINE)
_MODULE = re.compile(r"\bpython3?[ \t]+-m[ \t]+(?P<name>[\w.]+)")
_OUR_MODULE = re.compile(r"tests(\.\w+)+")
_PATH = re.compile(r"[\w.*-]+(/[\w.*-]+)+/?|[\w.*-]+/")
_SUFFIXES = {".py", ".md", ".lua", ".yaml", ".yml", ".toml", ".sh", ".svg"}
# A file named without its folder must be one of ours if it ends so; others may be a user's or a checkpoint's.
_OUR_SUFFIXES = {".py", ".lua"}
PACKAGES = ("worker", "engine", "kernels", "settings", "tests")
_SKIPPED = {".venv", "node_modules", "__pycache__"}
# These look like settings but belong to Redis.
_FOREIGN = {"redis.conf", "redis.io"}

_TARGET = re.compile(r"^([a-z][\w-]*):", re.MULTILINE)

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# A span may go on in the next line of its paragraph.
_SPAN = re.compile(r"`([^`\n]+(?:\n[^`\n]+)*)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class KnownNames:
    """The names that documents may use, read from the code."""

    settings: frozenset[str]
    groups: frozenset[str]
    variables: frozenset[str]
    metrics: frozenset[str]
    commands: Mapping[str, frozenset[str]]  # of `millrace` -> its options, as they are spelt
    targets: frozenset[str]  # of make

    @classmethod
    def of_code(cls, root: Path) -> Self:
        """Read the names from the code under `root`."""
        rows = load_settings(environ={}).rows()
        return cls(
            settings=frozenset(row.key for row in rows),
            groups=frozenset(group for row in rows for group in _prefixes(row.key)),
            variables=frozenset(row.variable for row in rows) | {PROFILE_VARIABLE},
            metrics=frozenset(metric.name for metric in (*METRICS, *SERVER_METRICS))
            | {
                f"{metric.name}_{part}"
                for metric in (*METRICS, *SERVER_METRICS)
                if metric.buckets
                for part in ("bucket", "sum", "count")
            },
            commands=_commands(),
            targets=frozenset(_TARGET.findall((root / "Makefile").read_text())),
        )


@dataclass(frozen=True)
class DocumentCheck:
    """Compares documents with the code under `root`."""

    root: Path
    names: KnownNames

    def documents(self) -> list[Path]:
        """Every Markdown file of this repository."""
        found = (path.relative_to(self.root) for path in sorted(self.root.rglob("*.md")))
        return [path for path in found if not any(part in _SKIPPED or part.startswith(".") for part in path.parts[:-1])]

    def problems(self, document: Path, text: str) -> list[Problem]:
        """What the text of `document` names that does not exist. `document` is relative to the root."""
        markdown = Markdown(text)
        shell = [piece for language, piece in markdown.fenced if language in ("", "sh", "bash", "shell", "console")]
        spans = list(markdown.spans)
        found: list[tuple[int, str, str]] = [*self._names(Piece(text, 1))]
        for piece in (*spans, *shell):
            found += [*self._settings(piece), *self._commands(piece), *self._targets(piece), *self._modules(piece)]
        for piece in spans:
            found += [*self._paths(piece, document), *self._options(piece)]
        for piece in markdown.links:
            found += self._links(piece, document, markdown)
        return sorted({Problem(document.as_posix(), *problem) for problem in found})

    def _names(self, piece: Piece) -> Iterator[tuple[int, str, str]]:
        for match in _VARIABLE.finditer(piece.text):
            if match[0] not in self.names.variables:
                yield _line(piece, match), match[0], "there is no such variable"
        for match in _METRIC.finditer(piece.text):
            name = match[0].rstrip("*")
            is_known = any(metric.startswith(name) for metric in self.names.metrics) if match["open"] else False
            if name not in self.names.metrics and not is_known:
                yield _line(piece, match), match[0], "there is no such metric"

    def _settings(self, piece: Piece) -> Iterator[tuple[int, str, str]]:
        tops = "|".join(sorted(group for group in self.names.groups if "." not in group))
        for match in re.finditer(rf"(?<![\w./:@\"'-])(?:{tops})(?:\.\w+)+(\.?\*)?(?![\w/(])", piece.text):
            name = match[0].rstrip("*")
            if match[1]:
                is_known = any(key.startswith(name) for key in (*self.names.settings, *self.names.groups))
            else:
                is_known = name in self.names.settings or name in _FOREIGN or self._is_python(name)
            if not is_known:
                yield _line(piece, match), match[0], "there is no such setting, and no such module"

    def _is_python(self, name: str) -> bool:
        """Whether a name is one of our modules, something in one (`worker.client.BatchClient`), or redis-py's."""
        if name.startswith("redis."):
            return hasattr(redis, name.split(".")[1])
        path = self.root.joinpath(*name.split("."))
        if path.is_dir() or path.with_suffix(".py").is_file():
            return True
        module, word = path.parent.with_suffix(".py"), path.name
        return module.is_file() and re.search(rf"\b{word}\b", module.read_text()) is not None

    def _commands(self, piece: Piece) -> Iterator[tuple[int, str, str]]:
        for match in _COMMAND.finditer(piece.text.replace("\\\n", "  ")):
            line, options = _line(piece, match), self.names.commands.get(match["name"])
            if options is None:
                yield line, f"millrace {match['name']}", "there is no such command"
                continue
            for option in _OPTION.findall(match["rest"]):
                if option not in options:
                    yield line, f"millrace {match['name']} {option}", "there is no such option"

    def _options(self, piece: Piece) -> Iterator[tuple[int, str, str]]:
        """An option by itself may be any command's, or any program's that our files call with it."""
        match = _OPTION_ALONE.fullmatch(piece.text)
        if match is None or any(match[1] in options for options in self.names.commands.values()):
            return
        if not re.search(rf"(?<![\w-]){match[1]}(?![\w-])", self._code):
            yield piece.line, match[1], "there is no such option"

    @cached_property
    def _file_names(self) -> frozenset[str]:
        return frozenset(path.name for package in PACKAGES for path in (self.root / package).rglob("*.*"))

    @cached_property
    def _code(self) -> str:
        """The text of all files that may call a program with an option."""
        files = [self.root / "Makefile", *self.root.glob("*.yaml"), self.root / "worker/Dockerfile"]
        for package in PACKAGES:
            files += (self.root / package).rglob("*.py")
        return "\n".join(file.read_text() for file in files if "test_documents" not in file.name)

    def _targets(self, piece: Piece) -> Iterator[tuple[int, str, str]]:
        for match in _MAKE.finditer(_without_comments(piece.text)):
            if match["name"] not in self.names.targets:
                yield _line(piece, match), f"make {match['name']}", "there is no such target"

    def _modules(self, piece: Piece) -> Iterator[tuple[int, str, str]]:
        for match in _MODULE.finditer(piece.text):
            if not self._can_run(match["name"]):
                yield _line(piece, match), f"python -m {match['name']}", "there is no such module"
        if _OUR_MODULE.fullmatch(piece.text) and not self._is_python(piece.text):
            yield piece.line, piece.text, "there is no such module"

    def _can_run(self, module: str) -> bool:
        path = self.root.joinpath(*module.split("."))
        if path.name.isupper():  # stands for any
            return path.parent.is_dir()
        if not (self.root / module.partition(".")[0]).is_dir():
            return importlib.util.find_spec(module.partition(".")[0]) is not None
        return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()

    def _paths(self, piece: Piece, document: Path) -> Iterator[tuple[int, str, str]]:
        text = piece.text
        if Path(text).suffix in _OUR_SUFFIXES and re.fullmatch(r"\w+\.\w+", text):
            if text not in self._file_names:
                yield piece.line, text, "there is no such file"
            return
        if not _PATH.fullmatch(text):
            return
        top, folder = text.partition("/")[0], (self.root / document).parent
        is_ours = Path(text).suffix in _SUFFIXES or (self.root / top).is_dir() or (folder / top).is_dir()
        if is_ours and not any(self.root.glob(text)) and not any(folder.glob(text)):
            yield piece.line, text, "there is no such file or folder"

    def _links(self, piece: Piece, document: Path, markdown: Markdown) -> Iterator[tuple[int, str, str]]:
        if re.match(r"[a-z]+:", piece.text):
            return
        path, _, anchor = piece.text.partition("#")
        target = (self.root / document).parent / path if path else None
        if target is not None and not target.exists():
            yield piece.line, piece.text, "this link leads nowhere"
        elif anchor:
            other = markdown if target is None else Markdown(target.read_text())
            if anchor not in other.anchors:
                yield piece.line, piece.text, "there is no such heading"


def _line(piece: Piece, match: re.Match[str]) -> int:
    return piece.line + piece.text.count("\n", 0, match.start())


def _without_comments(text: str) -> str:
    return re.sub(r"(?m)(^|\s)#.*$", r"\1", text)


def _prefixes(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _commands() -> dict[str, frozenset[str]]:
    context = click.Context(cli)
    found = {}
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        commands = [command] if command else []
        if isinstance(command, click.Group):
            commands += command.commands.values()
        parameters = [parameter for one in commands for parameter in one.params]
        found[name] = frozenset(
            spelling
            for option in parameters
            for spelling in (*option.opts, *option.secondary_opts)
            if spelling[0] == "-"
        ) | {"--help"}
    return found


@dataclass(frozen=True, order=True)
class Problem:
    """A name that does not exist, and where it stands."""

    document: str
    line: int
    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}: {self.name}: {self.why}"


@dataclass(frozen=True)
class Piece:
    """A part of a document, and the line it begins in, counted from 1."""

    text: str
    line: int


@dataclass(frozen=True)
class Markdown:
    """A document's text, and the code, links and headings in it."""

    text: str

    @property
    def fenced(self) -> list[tuple[str, Piece]]:
        """Fenced blocks with their language, which may be empty."""
        return [(match[1], self._piece(match, 2)) for match in _FENCE.finditer(self.text)]

    @property
    def prose(self) -> str:
        """The text with an empty line for each line of a fenced block."""
        return _FENCE.sub(lambda match: "\n" * match[0].count("\n"), self.text)

    @property
    def spans(self) -> Iterator[Piece]:
        """Code spans, each joined to one line."""
        for match in _SPAN.finditer(self.prose):
            yield Piece(" ".join(match[1].split()), self._line(match.start(1)))

    @property
    def links(self) -> Iterator[Piece]:
        """The targets of links."""
        for match in _LINK.finditer(_SPAN.sub(lambda span: "-" * len(span[0]), self.prose)):
            yield Piece(match[1], self._line(match.start(1)))

    @property
    def anchors(self) -> set[str]:
        """The anchors that GitHub gives the headings."""
        titles = (match[1].lower() for match in _HEADING.finditer(self.prose))
        return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}

    def _piece(self, match: re.Match[str], group: int) -> Piece:
        return Piece(match[group], self.text.count("\n", 0, match.start(group)) + 1)

    def _line(self, offset_in_prose: int) -> int:
        return self.prose.count("\n", 0, offset_in_prose) + 1
