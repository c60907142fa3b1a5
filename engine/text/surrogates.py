"""Text that UTF-8 cannot hold."""

from __future__ import annotations

from engine.errors import InvalidRequest


def check_encodable(text: str, *, param: str) -> None:
    """Raises InvalidRequest if `text` has a lone surrogate, which JSON can spell (`"\\ud800"`) and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code_point = f"U+{ord(text[error.start]):04X}"
        raise InvalidRequest(
            f"{param} has the lone surrogate {code_point} at character {error.start}; accepted: text without",
            param=param,
            value=code_point,
            accepted="text without surrogates",
        ) from error
