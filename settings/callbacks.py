"""How the callbacks of jobs that have ended are sent: the group `callbacks`."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr

from settings.fields import Accepted, Seconds, SettingsGroup, Unit

SECRET_PREFIX = "whsec_"
LEAST_SECRET_BYTES, MOST_SECRET_BYTES = 24, 64  # as standardwebhooks has it

_SECRET_FORM = f"{SECRET_PREFIX} and {LEAST_SECRET_BYTES} to {MOST_SECRET_BYTES} random bytes in base64"


def read_secret(text: str) -> bytes:
    """The key of a secret of standardwebhooks. Raises ValueError, which never holds it."""
    try:
        key = base64.b64decode(text.removeprefix(SECRET_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("no secret") from None
    if not text.startswith(SECRET_PREFIX) or not LEAST_SECRET_BYTES <= len(key) <= MOST_SECRET_BYTES:
        raise ValueError("no secret")
    return key


def _check_secret(secret: SecretStr) -> SecretStr:
    read_secret(secret.get_secret_value())
    return secret


class CallbackSettings(SettingsGroup):
    """Who sends them needs these: workers and `millrace serve`. Whom a job may name is in `limits.callback_*`."""

    secret: Annotated[SecretStr, Accepted(_SECRET_FORM), AfterValidator(_check_secret)] | None = Field(
        default=None,
        description="Signs what is sent to URLs (standardwebhooks); the receivers have it too. None: none is sent.",
    )
    timeout_s: Seconds = Field(
        default=10.0, ge=0.1, le=300, description="Longest time that a receiver may take, from connection to answer."
    )
    max_tries: Annotated[int, Unit("tries")] = Field(
        default=20, ge=1, le=1000, description="Tries of a callback, with waits that double, until it is given up."
    )
    longest_wait_s: Seconds = Field(
        default=3600.0, ge=0.1, le=86_400, description="Longest wait between two tries; the first is 5 s or this."
    )
