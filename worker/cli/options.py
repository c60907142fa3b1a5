"""Reads the options of commands: inputs, settings, which override the environment's, durations and metadata."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import click
from click.shell_completion import CompletionItem

from settings import EffectiveSettings, LimitSettings, Settings, SettingsError, load_settings, parse_assignments
from worker.cli.exit_codes import BadUsage
from worker.cli.files import local_name
from worker.lines.errors import NotIgnorable
from worker.lines.ignored import IgnoredParams
from worker.runtime.log_setup import configure_logging

Command = TypeVar("Command", bound=Callable[..., object])

# The settings that a producer reads; the others are its workers'.
PRODUCER_SECTIONS = ("redis", "limits", "log", "tracing")

_UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_FORM = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)")


_INPUTS = "Request lines: - is stdin, a pattern in quotes all files of such a name, gzip is unpacked"


def complete_file(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of files, which the shell completes by itself."""
    return [CompletionItem(incomplete, type="file")]


def complete_directory(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of directories, likewise."""
    return [CompletionItem(incomplete, type="dir")]


def as_local_name(_context: click.Context, _parameter: click.Parameter, name: str | None) -> str | None:
    """The path that a file:// URL means, as an option's callback; any other name as it is. Raises BadUsage."""
    return None if name is None else local_name(name)


def input_options(command: Callable[..., None]) -> Callable[..., None]:
    """FILE..., and `-i FILE` beside it; the function gets `input_paths`, of which there is at least one."""

    @functools.wraps(command)
    def with_inputs(named: tuple[str, ...], more: tuple[str, ...], **arguments: object) -> None:
        if not named and not more:
            raise BadUsage("no input is named; accepted: FILE..., - for standard input")
        command(input_paths=(*named, *more), **arguments)

    option = click.option(
        "-i", "--input", "more", multiple=True, metavar="FILE", shell_complete=complete_file,
        help=f"{_INPUTS}. The same as FILE, after those. Repeatable.",
    )  # fmt: skip
    return click.argument("named", nargs=-1, metavar="FILE...", shell_complete=complete_file)(option(with_inputs))


def set_option(command: Command) -> Command:
    """`--set KEY=VALUE`, which every command has; the function gets `assignments`."""
    return _set_option("any setting", "engine.max_num_seqs=64")(command)


def redis_options(command: Command) -> Command:
    """`--set` and `--redis-url`, for commands that talk to Redis; the function gets `redis_url` too."""
    return _redis_url_option(set_option(command))


def producer_options(command: Command) -> Command:
    """`redis_options` for commands that read only the settings of producers."""
    return _redis_url_option(_set_option(_words(PRODUCER_SECTIONS), "redis.socket_timeout_s=30")(command))


def ignore_param_option(command: Command) -> Command:
    """`--ignore-param`, for commands that read request lines; the function gets `ignored_params`."""
    help_text = "Leave this parameter out of every line that has it, and say of how many. Repeatable."
    return click.option("--ignore-param", "ignored_params", multiple=True, metavar="NAME", help=help_text)(command)


def read_ignored_params(names: Sequence[str], limits: LimitSettings) -> IgnoredParams:
    """What `--ignore-param` names. Raises BadUsage for a name without which a line would be another request."""
    try:
        return IgnoredParams(names, limits)
    except NotIgnorable as error:
        raise BadUsage(f"--ignore-param {error}") from error


def load_producer_settings(assignments: Sequence[str], redis_url: str | None) -> EffectiveSettings:
    """`load_command_settings` for a command with `producer_options`.

    Raises BadUsage also for a setting that such a command would not read: a worker has settings of its own.
    """
    try:
        keys = list(parse_assignments(assignments))
    except SettingsError as error:
        raise BadUsage(str(error)) from error
    for key in keys:
        section, dot, _ = key.partition(".")
        if dot and section not in PRODUCER_SECTIONS and section in Settings.model_fields:
            raise BadUsage(f"--set {key}: this command does not read it; accepted: {_words(PRODUCER_SECTIONS)}")
    return load_command_settings(assignments, {"redis.url": redis_url})


def load_command_settings(assignments: Sequence[str], named: Mapping[str, str | None]) -> EffectiveSettings:
    """The settings in force; `named` are options that stand for a setting, None if not given.

    Also sets up logging, which follows from them. Raises BadUsage, one line, for a wrong setting.
    """
    try:
        overrides = parse_assignments(assignments)
        overrides.update({key: value for key, value in named.items() if value is not None})
        effective = load_settings(overrides)
    except SettingsError as error:
        raise BadUsage(str(error)) from error
    configure_logging(effective.settings.log)
    return effective


def _set_option(what: str, example: str) -> Callable[[Command], Command]:
    help_text = f"Set {what} by its dotted path, such as {example}. Repeatable."
    return click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help=help_text)


def _redis_url_option(command: Command) -> Command:
    help_text = "Redis to use (redis.url). One with a password belongs into MILLRACE_REDIS__URL: `ps` shows options."
    return click.option("--redis-url", metavar="URL", help=help_text)(command)


def _words(sections: Sequence[str]) -> str:
    return " or ".join((", ".join(f"{section}.*" for section in sections[:-1]), f"{sections[-1]}.*"))


class Duration(click.ParamType[float]):
    """Seconds, or a number with a unit: 90, 90s, 30m, 2h, 1d. Converts to seconds."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds as a float; anything else is bad usage."""
        match = _FORM.fullmatch(str(value))
        seconds = float(match[1]) * _UNITS_S[match[2]] if match else 0.0
        if seconds <= 0:
            self.fail(f"{value!r} is no duration; accepted: 90, 90s, 30m, 2h, 1d", param, ctx)
        return seconds


def parse_metadata(texts: Sequence[str]) -> dict[str, str]:
    """`["run=7"]` as a mapping. Raises BadUsage for a text without key or =, and for a key given twice."""
    metadata: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise BadUsage(f"--metadata {text}: accepted: key=value")
        if key in metadata:
            raise BadUsage(f"--metadata {text}: {key} is given twice")
        metadata[key] = value
    return metadata
