"""Where a setting's value came from."""

from __future__ import annotations

from enum import Enum

ENV_PREFIX = "MILLRACE_"
ENV_DELIMITER = "__"
PROFILE_VARIABLE = "MILLRACE_PROFILE"  # names the TOML profile; not a setting itself


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
