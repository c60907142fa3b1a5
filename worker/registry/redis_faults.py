"""What an error of Redis says about the command."""

from __future__ import annotations

import re

import redis

# Answers about the server's state or our rights: the same command succeeds when that changes. Searched for anywhere,
# because a Redis before 7 puts the code of an error inside a script into the text of another.
_PASSING = re.compile(
    r"\b(OOM|READONLY|LOADING|MISCONF|BUSY|MASTERDOWN|NOREPLICAS|CLUSTERDOWN|TRYAGAIN|NOSCRIPT|NOAUTH|NOPERM)\b"
)
_PASSING_TYPES = (
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.NoScriptError,
    redis.exceptions.NoPermissionError,
)


def is_refusal(error: redis.RedisError) -> bool:
    """Whether Redis refused a command for what is in it, so that it would refuse it again."""
    if isinstance(error, redis.DataError):  # not even sent
        return True
    if not isinstance(error, redis.ResponseError) or isinstance(error, _PASSING_TYPES):
        return False
    return _PASSING.search(str(error)) is None
