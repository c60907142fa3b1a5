"""Errors in settings: an unknown name, a value that is not accepted, or two values that contradict each other."""

from __future__ import annotations


class SettingsError(ValueError):
    """A setting that cannot be used. `str()` is one line that names it as the user wrote it.

    `name`: the setting as written (`MILLRACE_ENGINE__SEED`, `.env:3: MILLRACE_ENGINE__SEED`, `--set engine.seed`) or
    the file at fault. `value`: as written, masked where secret; None: there is none. `accepted`: what would be
    accepted; None: the value is not at fault.
    """

    def __init__(self, name: str, value: str | None, problem: str, *, accepted: str | None = None) -> None:
        self.name = name
        self.value = value
        self.problem = problem
        self.accepted = accepted
        where = name if value is None else f"{name}={value}"
        parts = [where, problem] if problem else [where]
        tail = [] if accepted is None else [f"accepted: {accepted}"]
        # After a question mark no separator is needed: "did you mean X? accepted: ...".
        separator = " " if problem.endswith("?") else ": " if not problem else "; "
        super().__init__(separator.join([": ".join(parts), *tail]))


class FieldOrderError(ValueError):
    """Within one group, `low` times `factor` is greater than `high`; `load_settings` turns it into a SettingsError."""

    def __init__(self, low: str, high: str, *, factor: int = 1) -> None:
        self.low = low
        self.high = high
        self.factor = factor
        super().__init__(f"{low} must be {self.at_most(high)}")

    def at_most(self, high: str) -> str:
        """What is accepted for the low field, given a way to name the high one."""
        return f"at most {high}" if self.factor == 1 else f"at most 1/{self.factor} of {high}"

    def at_least(self, low: str) -> str:
        """What is accepted for the high field, given a way to name the low one."""
        return f"at least {low}" if self.factor == 1 else f"at least {self.factor} times {low}"
