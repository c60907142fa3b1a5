"""Lists the Redis users that producers, workers, servers and operators need, each with its commands and keys alone.

They are the users of a Redis that Millrace shares with nobody. Redis checks what a script calls as if its caller had
called it, so the commands of scripts/*.lua are here too. A user cannot be limited to one tenant: one who may submit
jobs may read, cancel and spoil every job of that Redis, since cancelling writes records. Teams that must not see each
other's prompts need a Redis each, or keys of `millrace serve` in place of a Redis user.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from worker.registry.connect import MAX_PASSWORD_BYTES, read_password_line

# From 7.0 to 7.2 Redis knows subcommands and refuses to start with one that it does not know.
_SUBCOMMANDS_CHECKED = (7, 0)
_HAS_SETINFO = (7, 2)
# What clients say on connecting; redis-py 8 sends the last one to any server, and works without it.
_FIRST_WORDS = ("client|setname", "client|setinfo", "client|maint_notifications")

# On connecting, and in between. INFO is for `millrace doctor` and for kombu.
_CONNECTION = ("hello", "auth", "select", "ping", "info")
# No EVAL: scripts are loaded, then named by their digest. A script may run for ever, and a user who may load one may so
# stop the server, where functions only an administrator or a worker loads. So a producer may send scripts to no Redis
# that has functions; a worker to any: those of a version before know nothing else.
_SCRIPTS = ("script|load", "script|exists", "evalsha")
_FUNCTIONS = ("fcall", "fcall_ro")
_HAS_FUNCTIONS = (7, 0)
# Of redis.ack.
_WAITING, _WAITING_FOR_DISK = ("wait",), ("waitaof",)
_HAS_WAITAOF = (7, 2)
# A Celery producer's: declare the queue, look how long it is, send.
_SENDING = ("sadd", "smembers", "llen", "lpush", "multi", "exec")
# What stage, submit, discard and cancel call, and claim, put, renew and release, by which cancelling ends the units
# that nobody runs.
_JOBS = (
    *("del", "exists", "expire", "get", "persist", "pexpire", "rename", "set", "time", "unlink"),
    *("hdel", "hexists", "hget", "hgetall", "hincrby", "hkeys", "hlen", "hmget", "hset", "hsetnx", "hstrlen"),
    *("lrange", "rpush", "zadd", "zrange", "zrevrange", "zrem", "zremrangebyrank"),
)

_QUEUE_KEYS = (
    "millrace",
    "millrace??[0-9]",
    "millrace.*",  # a model's
    "_kombu.binding.millrace",
    "_kombu.binding.millrace.*",
    "_kombu.binding_permanent.millrace",
    "_kombu.binding_permanent.millrace.*",
)  # the lanes end in \x06\x16 and a step
# A job's keys; units to look at, queued shards, counters, the list of jobs, dead units, producers' own keys for jobs.
_JOB_KEYS = tuple(
    f"millrace:{{*}}:{part}" for part in ("j:*", "open", "queued*", "adm*", "jobs", "dead", "idem:*", "w:*", "cb:*")
)

# Uploaded files, and the digests of keys.
_SERVER_KEYS = tuple(f"millrace:{{*}}:{part}" for part in ("f:*", "files:*", "keys"))

# Celery's events, for Flower: kombu's channel of a topic in each of the databases that Redis has by default.
_EVENT_CHANNELS = tuple(f"/{database}.celeryev/*" for database in range(16))

# Beside a producer's: taking messages, giving them back, choosing a shard, the reaper's look at what is due,
# the list of bad frames, how long the queue is (metrics), a new append-only file.
_CONSUMING = (
    *("brpop", "watch", "unwatch", "discard", "zrangebyscore", "zrevrangebyscore", "zscore", "zcard", "ltrim"),
    "bgrewriteaof",
)

# Off: nobody can log in as this user, so a client without a name may do nothing. It has every right: Redis 7.2 and 8.0
# drop, when they load their append-only file, what scripts wrote and this user may not write
# (https://github.com/redis/redis/pull/14545).
_DEFAULT_USER = "user default reset off ~* &* +@all"
# A health check asks without a secret whether Redis has loaded its data and can write them.
_HEALTH_USER = "user millrace-health reset on nopass resetchannels -@all +ping"

# Redis keeps an unsalted SHA-256 of it: a short one is guessed from the ACL file.
MIN_CHARACTERS = 16
_GENERATED_BYTES = 32


@dataclass(frozen=True, slots=True)
class RedisUser:
    """A user's name, the keys it may touch, the commands it may call on them, and the channels it may use."""

    name: str
    key_patterns: tuple[str, ...]  # Redis's globs
    commands: tuple[str, ...]  # lower case, `script|load` for a subcommand
    channels: tuple[str, ...] = ()  # of Pub/Sub; Redis's globs, which a subscriber's own pattern must equal
    before: tuple[tuple[tuple[int, int], tuple[str, ...]], ...] = ()  # commands on servers older than a version only
    since: tuple[tuple[tuple[int, int], tuple[str, ...]], ...] = ()  # and from one on, as older ones do not know them

    def acl_line(self, password: str, redis_version: tuple[int, int]) -> str:
        """The line of an ACL file, for servers of this version; it holds the SHA-256 of the password."""
        digest = hashlib.sha256(password.encode()).hexdigest()
        keys = " ".join(f"~{pattern}" for pattern in self.key_patterns)
        channels = "".join(f" &{pattern}" for pattern in self.channels)
        commands = [*_first_words(redis_version), *self.commands]
        commands += [command for version, known in self.before if redis_version < version for command in known]
        commands += [command for version, known in self.since if redis_version >= version for command in known]
        rules = " ".join(f"+{command}" for command in commands)
        return f"user {self.name} reset on #{digest} resetchannels{channels} {keys} -@all {rules}"


def _first_words(redis_version: tuple[int, int]) -> tuple[str, ...]:
    if redis_version < _SUBCOMMANDS_CHECKED:
        return _FIRST_WORDS
    return _FIRST_WORDS[:2] if redis_version >= _HAS_SETINFO else _FIRST_WORDS[:1]


# SCAN, by which producers find the workers, shows the names of all keys, though not what they hold.
PRODUCER = RedisUser(
    "millrace-producer",
    (*_JOB_KEYS, *_QUEUE_KEYS),
    (*_CONNECTION, *_SENDING, *_JOBS, *_WAITING, "scan"),
    before=((_HAS_FUNCTIONS, _SCRIPTS),),
    since=((_HAS_FUNCTIONS, _FUNCTIONS), (_HAS_WAITAOF, _WAITING_FOR_DISK)),
)

WORKER = RedisUser(
    "millrace-worker",
    ("millrace:{*}:*", *_QUEUE_KEYS, "unacked", "unacked_index", "unacked_mutex"),
    (*_CONNECTION, *_SCRIPTS, *_SENDING, *_JOBS, *_CONSUMING, "publish"),
    _EVENT_CHANNELS,
    since=((_HAS_FUNCTIONS, (*_FUNCTIONS, "function|load")),),
)

# Of `millrace serve`: a producer that also keeps uploaded files and knows the keys of its clients. It may load the
# functions, as it may be there before any worker is.
SERVER = RedisUser(
    "millrace-server",
    (*_JOB_KEYS, *_QUEUE_KEYS, *_SERVER_KEYS),
    (*_CONNECTION, *_SENDING, *_JOBS, *_WAITING, "copy", "zcard"),
    before=((_HAS_FUNCTIONS, _SCRIPTS),),
    since=((_HAS_FUNCTIONS, (*_FUNCTIONS, "function|load")), (_HAS_WAITAOF, _WAITING_FOR_DISK)),
)

# Receives events; can neither send anything nor read a job or the queue. kombu notes the channel in a set while it
# listens, and on closing deletes that note and a queue that there never was.
FLOWER = RedisUser(
    "millrace-flower",
    ("_kombu.binding.celeryev", "_kombu.binding_permanent.celeryev", "celeryev.*"),
    (*_CONNECTION, "psubscribe", "punsubscribe", "llen", "sadd", "srem", "del", "multi", "exec"),
    _EVENT_CHANNELS,
)

# For people: backups, CONFIG, ACL LOG.
ADMIN = RedisUser("millrace-admin", ("*",), ("@all",))


def acl_file(
    passwords: Mapping[RedisUser, str], redis_version: tuple[int, int], callback_queues: Sequence[str] = ()
) -> str:
    """The text of an ACL file with these users and one who may only ask for health, for servers of this version.

    Workers and servers may send to `callback_queues` of other programs too.
    """
    forms = ("{}", "{}??[0-9]", "_kombu.binding.{}", "_kombu.binding_permanent.{}")  # its lanes, as in _QUEUE_KEYS
    patterns = tuple(form.format(queue) for queue in callback_queues for form in forms)
    lines = []
    for user, password in passwords.items():
        is_sender = user in (WORKER, SERVER)
        granted = replace(user, key_patterns=user.key_patterns + patterns) if is_sender else user
        lines.append(granted.acl_line(password, redis_version))
    return "\n".join([_DEFAULT_USER, _HEALTH_USER, *lines, ""])


class UnusablePassword(Exception):
    """A password file that cannot be used; the message names the file."""


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
