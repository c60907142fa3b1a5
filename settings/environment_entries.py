"""Settings in environment variables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from settings.entry import Entry
from settings.source import ENV_PREFIX, Source


def is_ours(name: str) -> bool:
    """Whether a variable is meant for us; in any letter case, since `millrace_log__level` is a slip, not a stranger."""
    return name.upper().startswith(ENV_PREFIX)


def environment_entries(environ: Mapping[str, str]) -> Iterator[Entry]:
    """The variables meant for us, in the order of their names."""
    for name in sorted(environ):
        if is_ours(name):
            yield Entry(Source.ENVIRONMENT, name, environ[name])
