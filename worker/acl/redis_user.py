"""One Redis user."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

# From 7.0 to 7.2 Redis knows subcommands and refuses to start with one that it does not know.
_SUBCOMMANDS_CHECKED = (7, 0)
_HAS_SETINFO = (7, 2)
# What clients say on connecting; redis-py 8 sends the last one to any server, and does without it.
_FIRST_WORDS = ("client|setname", "client|setinfo", "client|maint_notifications")


@dataclass(frozen=True, slots=True)
class RedisUser:
    """A user's name, the keys it may touch, the commands it may call on them, and the channels it may use."""

    name: str
    key_patterns: tuple[str, ...]  # Redis's globs
    commands: tuple[str, ...]  # lower case, `script|load` for a subcommand
    channels: tuple[str, ...] = ()  # of Pub/Sub; Redis's globs, which a subscriber's own pattern must equal

    def acl_line(self, password: str, redis_version: tuple[int, int]) -> str:
        """The line of an ACL file, for servers of this version; it holds the SHA-256 of the password."""
        digest = hashlib.sha256(password.encode()).hexdigest()
        keys = " ".join(f"~{pattern}" for pattern in self.key_patterns)
        channels = "".join(f" &{pattern}" for pattern in self.channels)
        rules = " ".join(f"+{command}" for command in (*_first_words(redis_version), *self.commands))
        return f"user {self.name} reset on #{digest} resetchannels{channels} {keys} -@all {rules}"


def _first_words(redis_version: tuple[int, int]) -> tuple[str, ...]:
    if redis_version < _SUBCOMMANDS_CHECKED:
        return _FIRST_WORDS
    return _FIRST_WORDS[:2] if redis_version >= _HAS_SETINFO else _FIRST_WORDS[:1]
