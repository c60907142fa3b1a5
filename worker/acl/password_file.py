"""A password in a file of its own."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from worker.acl.errors import UnusablePassword

# Redis keeps an unsalted SHA-256 of it: a short one is guessed from the ACL file.
MIN_CHARACTERS = 16
MAX_BYTES = 512
_GENERATED_BYTES = 32


def read_password(file: Path) -> str:
    """The one line that the file holds. Raises UnusablePassword naming the file, never what it holds."""
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
        password = data.decode().removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise UnusablePassword(f"{file}: {error.strerror}; --generate makes one") from error
    except UnicodeDecodeError:
        raise UnusablePassword(f"{file}: not UTF-8; accepted: one line of text") from None
    if len(data) > MAX_BYTES or len(password) < MIN_CHARACTERS or not password.isprintable():
        raise UnusablePassword(
            f"{file}: not a password; accepted: one line, {MIN_CHARACTERS} characters to {MAX_BYTES} bytes"
        )
    return password


def generate_password(file: Path) -> None:
    """Write a new password into a file that only its owner may read; one that exists is left as it is.

    Raises UnusablePassword where the file cannot be made.
    """
    try:
        descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        return
    except OSError as error:
        raise UnusablePassword(f"{file}: {error.strerror}") from error
    with os.fdopen(descriptor, "w") as stream:
        stream.write(f"{secrets.token_urlsafe(_GENERATED_BYTES)}\n")
