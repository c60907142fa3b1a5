"""Every name that a document may use for a thing of ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import click

from settings import load_settings
from settings.sources import PROFILE_VARIABLE
from worker.cli.main import cli
from worker.metrics.catalogue import METRICS

_TARGET = re.compile(r"^([a-z][\w-]*):", re.MULTILINE)


@dataclass(frozen=True)
class KnownNames:
    """Read off the code."""

    settings: frozenset[str]
    groups: frozenset[str]
    variables: frozenset[str]
    metrics: frozenset[str]
    commands: Mapping[str, frozenset[str]]  # of `millrace` -> its options, as they are spelt
    targets: frozenset[str]  # of make

    @classmethod
    def of_code(cls, root: Path) -> Self:
        """As the code stands."""
        rows = load_settings(environ={}).rows()
        return cls(
            settings=frozenset(row.key for row in rows),
            groups=frozenset(group for row in rows for group in _prefixes(row.key)),
            variables=frozenset(row.variable for row in rows) | {PROFILE_VARIABLE},
            metrics=frozenset(metric.name for metric in METRICS)
            | {f"{metric.name}_{part}" for metric in METRICS if metric.buckets for part in ("bucket", "sum", "count")},
            commands=_commands(),
            targets=frozenset(_TARGET.findall((root / "Makefile").read_text())),
        )


def _prefixes(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _commands() -> dict[str, frozenset[str]]:
    context = click.Context(cli)
    found = {}
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        parameters = command.params if command else []
        found[name] = frozenset(
            spelling
            for option in parameters
            for spelling in (*option.opts, *option.secondary_opts)
            if spelling[0] == "-"
        ) | {"--help"}
    return found
