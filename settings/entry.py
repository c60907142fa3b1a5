"""One value as somebody wrote it."""

from __future__ import annotations

from dataclasses import dataclass

from settings.masking import show
from settings.source import ENV_DELIMITER, ENV_PREFIX, Source


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
