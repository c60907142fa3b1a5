"""A record as the bytes of its line."""

from __future__ import annotations

import json
from collections.abc import Mapping

# Made once: json.dumps makes one a call where it is given options.
_ENCODER = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def encode_record(record: Mapping[str, object]) -> str:
    """One line of JSONL without its line end: ASCII only, no NaN, so that any reader takes it."""
    return _ENCODER.encode(record)


def has_failed(record: Mapping[str, object]) -> bool:
    """Whether `record` is of a request without an answer."""
    response = record.get("response")
    return not isinstance(response, Mapping) or response.get("status_code") != 200
