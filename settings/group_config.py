"""What every group of settings has in common."""

from __future__ import annotations

from pydantic import ConfigDict

# What holds for one value checked by itself, before there is a group.
VALUE_CONFIG = ConfigDict(strict=True, allow_inf_nan=False)

# strict: a boolean is not a number and "64" is not 64; text is read by settings.grammar before it comes here.
GROUP_CONFIG = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
