"""One line of `millrace config`."""

from __future__ import annotations

from dataclasses import dataclass

from settings.setting_spec import JsonValue
from settings.source import Source


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting with its effective value, ready to print; passwords are masked."""

    key: str  # engine.max_num_seqs
    variable: str  # MILLRACE_ENGINE__MAX_NUM_SEQS
    value: JsonValue
    value_text: str  # as it would be written in the environment: true, none, 64
    source: Source
    accepted: str  # a whole number, 1 to 65536
    unit: str | None  # requests
    description: str
    default: JsonValue
    default_text: str
