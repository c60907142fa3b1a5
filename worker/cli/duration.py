"""Durations on the command line."""

from __future__ import annotations

import re

import click

_UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_FORM = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)")


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
