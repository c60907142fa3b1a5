"""The file that a Redis reads its users from."""

from __future__ import annotations

from collections.abc import Mapping

from worker.acl.redis_user import RedisUser

# Whoever gives no name may do nothing.
_DEFAULT_USER = "user default reset off"


def acl_file(passwords: Mapping[RedisUser, str], redis_version: tuple[int, int]) -> str:
    """The text of an ACL file with these users and no other, for servers of this version."""
    lines = [user.acl_line(password, redis_version) for user, password in passwords.items()]
    return "\n".join([_DEFAULT_USER, *lines, ""])
