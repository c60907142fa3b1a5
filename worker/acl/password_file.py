"""A password in a file of its own."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from worker.acl.errors import UnusablePassword
from worker.registry.password_file import MAX_PASSWORD_BYTES, read_password_line

# Redis keeps an unsalted SHA-256 of it: a short one is guessed from the ACL file.
MIN_CHARACTERS = 16
_GENERATED_BYTES = 32


def read_password(file: Path) -> str:
    """The one line that the file holds. Raises UnusablePassword naming the file, never what it holds."""
    try:
        password = read_password_line(file)
    except OSError as error:
        raise UnusablePassword(f"{file}: {error.strerror}; --generate makes one") from error
    except ValueError as error:
        raise UnusablePassword(f"{file}: {error}; accepted: one line of text") from error
    if password is None or len(password) < MIN_CHARACTERS:
        raise UnusablePassword(
            f"{file}: not a password; accepted: one line, {MIN_CHARACTERS} characters to {MAX_PASSWORD_BYTES} bytes"
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
