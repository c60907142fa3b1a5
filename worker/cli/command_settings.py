"""Settings of one command: its options over the environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import click

from settings import EffectiveSettings, SettingsError, load_settings, parse_assignments
from worker.cli.bad_usage import BadUsage
from worker.process.log_setup import configure_logging

Command = TypeVar("Command", bound=Callable[..., object])


def set_option(command: Command) -> Command:
    """`--set KEY=VALUE`, which every command has; the function gets `assignments`."""
    return click.option(
        "--set",
        "assignments",
        multiple=True,
        metavar="KEY=VALUE",
        help="Set any setting by its dotted path, such as engine.max_num_seqs=64. Repeatable.",
    )(command)


def redis_options(command: Command) -> Command:
    """`--set` and `--redis-url`, which every command that talks to Redis has."""
    return click.option("--redis-url", metavar="URL", help="Redis to use (redis.url).")(set_option(command))


def load_command_settings(assignments: Sequence[str], named: Mapping[str, str | None]) -> EffectiveSettings:
    """The settings in force; `named` are options that stand for a setting, None where not given.

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
