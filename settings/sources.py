"""Where settings come from: `--set` options, environment variables, a `.env` file and a TOML profile.

Each is read into entries, values as somebody wrote them with the place they were written at; nothing is known about
them yet.
"""

from __future__ import annotations

import io
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from dotenv.parser import parse_stream

from settings.errors import SettingsError
from settings.masking import mask_userinfo, show

ENV_PREFIX = "MILLRACE_"
ENV_DELIMITER = "__"
PROFILE_VARIABLE = "MILLRACE_PROFILE"  # names the TOML profile; not a setting itself

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


class Source(Enum):
    """Where a value came from, strongest first. The value is what `millrace config` prints."""

    COMMAND_LINE = "command line"
    ENVIRONMENT = "environment"
    DOTENV = ".env"
    PROFILE = "profile"
    DERIVED = "derived"
    ESTIMATED = "estimated"  # without loading the model, which measures it
    DEFAULT = "default"

    def overrides(self, other: Source) -> bool:
        """Whether this source is stronger than `other`."""
        order = list(Source)
        return order.index(self) < order.index(other)

    def spell(self, key: str) -> str:
        """A dotted key as it is written in this source: `engine.seed` is `MILLRACE_ENGINE__SEED` in `.env`."""
        if self is Source.COMMAND_LINE:
            return f"--set {key}"
        if self in {Source.ENVIRONMENT, Source.DOTENV}:
            return ENV_PREFIX + key.upper().replace(".", ENV_DELIMITER)
        return key


@dataclass(frozen=True, slots=True)
class Origin:
    """Where one effective value came from, and under which name, so that a later error can say so."""

    source: Source
    written: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One value as somebody wrote it, before anything is known about it."""

    source: Source
    name: str  # as written: MILLRACE_ENGINE__SEED in the environment and .env, engine.seed elsewhere
    raw: object  # text, or what TOML or a Python caller made of it
    place: str = ""  # file and line, for error messages: "config/.env:3"

    @property
    def key(self) -> str | None:
        """The dotted key this name stands for, known or not; None if no key is written like this."""
        if self.source not in {Source.ENVIRONMENT, Source.DOTENV}:
            return self.name
        key = self.dotted
        return key if self.source.spell(key) == self.name else None

    @property
    def dotted(self) -> str:
        """The name as nearly as it can be read as a dotted key, to find what was meant."""
        if self.source not in {Source.ENVIRONMENT, Source.DOTENV}:
            return self.name.lower()
        return self.name[len(ENV_PREFIX) :].lower().replace(ENV_DELIMITER, ".")

    @property
    def written(self) -> str:
        """The name as the user wrote it, with its place, on one line."""
        name = f"--set {show(self.name)}" if self.source is Source.COMMAND_LINE else show(self.name)
        return f"{show(self.place)}: {name}" if self.place else name


def parse_assignments(texts: Iterable[str]) -> dict[str, str]:
    """`["engine.seed=7"]` as overrides for `load_settings`; of a key set twice the last counts, as with any option.

    Keys and values are not looked at here. Raises SettingsError for a text without `=` or without a key.
    """
    overrides: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise SettingsError(
                f"--set {show(mask_userinfo(text))}", None, "", accepted="key=value, such as engine.max_num_seqs=64"
            )
        overrides[key] = value
    return overrides


def is_ours(name: str) -> bool:
    """Whether a variable is meant for us; in any letter case, since `millrace_log__level` is a slip, not a stranger."""
    return name.upper().startswith(ENV_PREFIX)


def environment_entries(environ: Mapping[str, str]) -> Iterator[Entry]:
    """The variables meant for us, in the order of their names."""
    for name in sorted(environ):
        if is_ours(name):
            yield Entry(Source.ENVIRONMENT, name, environ[name])


def dotenv_entries(path: Path) -> Iterator[Entry]:
    """The variables of a `.env` file that are meant for us, in its order; others' variables are left to them.

    python-dotenv's parser is used without its loader, which skips lines it cannot read and replaces `${NAME}` from
    the environment. Raises SettingsError for an unreadable file, an unreadable line that names us, a name without a
    value and a name set twice.
    """
    first_line: dict[str, int] = {}
    for binding in parse_stream(io.StringIO(read_text_file(path), newline="")):
        # The parser counts from the line after the previous binding, so blank lines before a name are skipped here.
        text = binding.original.string
        line = binding.original.line + text[: len(text) - len(text.lstrip())].count("\n")
        place = f"{path}:{line}"
        if binding.error:
            if ENV_PREFIX in text.upper():
                raise SettingsError(show(place), None, "this line cannot be read", accepted="NAME=value")
            continue
        name = binding.key
        if name is None or not is_ours(name):
            continue
        entry = Entry(Source.DOTENV, name, binding.value, place)
        if binding.value is None:
            raise SettingsError(entry.written, None, "no value", accepted="NAME=value")
        if name in first_line:
            raise SettingsError(entry.written, None, f"set twice; the first time on line {first_line[name]}")
        first_line[name] = line
        yield entry


def profile_entries(path: Path, keys: Collection[str]) -> Iterator[Entry]:
    """The values of a TOML file, with the names of their tables: `block_size` in `[kv_cache]` is kv_cache.block_size.

    `keys` are those of the settings, below which nothing is a table. Raises SettingsError for a file that cannot be
    read or is not TOML.
    """
    text = read_text_file(path)
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        reason = str(error) if isinstance(error, tomllib.TOMLDecodeError) else "nested too deeply"
        raise SettingsError(show(str(path)), None, f"not TOML: {reason}") from error
    yield from _flatten(data, "", str(path), keys)


def _flatten(table: Mapping[str, object], prefix: str, place: str, keys: Collection[str]) -> Iterator[Entry]:
    for name, value in table.items():
        # A quoted "a.b" is one name with a dot in it, not a path; the quotes keep the two apart.
        key = prefix + (name if _BARE_KEY.fullmatch(name) else f'"{name}"')
        inside = any(known.startswith(f"{key}.") for known in keys)
        # A filled table of an unknown name is walked too, so that the error names a setting, not the table.
        if isinstance(value, dict) and (inside or (value and key not in keys)):
            yield from _flatten(value, f"{key}.", place, keys)
        else:
            yield Entry(Source.PROFILE, key, value, place)


def read_text_file(path: Path) -> str:
    """The text of a UTF-8 file, without a byte order mark. Raises SettingsError naming the file and the reason."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise SettingsError(show(str(path)), None, f"not UTF-8 at byte {error.start}") from error
    except (OSError, ValueError) as error:
        # ValueError: a path with a null byte in it.
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise SettingsError(show(str(path)), None, f"cannot be read: {reason}") from error
