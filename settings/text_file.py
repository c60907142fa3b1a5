"""Reading a settings file."""

from __future__ import annotations

from pathlib import Path

from settings.errors import SettingsError
from settings.masking import show


def read_text_file(path: Path) -> str:
    """The text of a UTF-8 file, without a byte order mark. Raises SettingsError naming the file and the reason."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise SettingsError(show(str(path)), None, f"not UTF-8 at byte {error.start}") from error
    except (OSError, ValueError) as error:
        # ValueError: a path with a null byte in it.
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise SettingsError(show(str(path)), None, f"cannot be read: {reason}") from error
