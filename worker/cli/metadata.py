"""Metadata on the command line."""

from __future__ import annotations

from collections.abc import Sequence

from worker.cli.bad_usage import BadUsage


def parse_metadata(texts: Sequence[str]) -> dict[str, str]:
    """`["run=7"]` as a mapping. Raises BadUsage for a text that is no key=value and for a key given twice."""
    metadata: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise BadUsage(f"--metadata {text}: accepted: key=value")
        if key in metadata:
            raise BadUsage(f"--metadata {text}: {key} is given twice")
        metadata[key] = value
    return metadata
