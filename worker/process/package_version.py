"""Which Millrace this is."""

from __future__ import annotations

from importlib import metadata


def package_version() -> str:
    """The installed version; `source` where it runs from a source tree that is not installed."""
    try:
        return metadata.version("millrace")
    except metadata.PackageNotFoundError:
        return "source"
