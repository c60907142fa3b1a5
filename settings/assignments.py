"""`--set key=value` options."""

from __future__ import annotations

from collections.abc import Iterable

from settings.errors import SettingsError
from settings.masking import mask_userinfo, show


def parse_assignments(texts: Iterable[str]) -> dict[str, str]:
    """`["engine.seed=7"]` as overrides for `load_settings`; of a key set twice the last counts, as with any option.

    Keys and values are not looked at here. Raises SettingsError for a text without `=` or without a key.
    """
    overrides: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise SettingsError(
                f"--set {show(mask_userinfo(text))}", None, "", accepted="key=value, such as engine.max_num_seqs=64"
            )
        overrides[key] = value
    return overrides
