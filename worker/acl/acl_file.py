"""The file that a Redis reads its users from."""

from __future__ import annotations

from collections.abc import Mapping

from worker.acl.redis_user import RedisUser

# Off: nobody can be this user, and who gives no name may do nothing. It has every right all the same: Redis 7.2 and 8.0
# drop, when they load their append-only file, what scripts wrote and this user may not write
# (https://github.com/redis/redis/pull/14545).
_DEFAULT_USER = "user default reset off ~* &* +@all"
# A health check asks without a secret whether Redis has loaded its data and can write them.
_HEALTH_USER = "user millrace-health reset on nopass resetchannels -@all +ping"


def acl_file(passwords: Mapping[RedisUser, str], redis_version: tuple[int, int]) -> str:
    """The text of an ACL file with these users and one who may only ask for health, for servers of this version."""
    lines = [user.acl_line(password, redis_version) for user, password in passwords.items()]
    return "\n".join([_DEFAULT_USER, _HEALTH_USER, *lines, ""])
