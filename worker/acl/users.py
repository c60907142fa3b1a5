"""The users of a Redis that Millrace shares with nobody.

Redis checks what a script calls as if its caller had called it, so the commands of scripts/*.lua are here too. A user
cannot be held to one tenant: whoever may submit jobs may read, cancel and spoil every job of that Redis, since
cancelling writes records. Teams that must not see each other's prompts need a Redis each.
"""

from __future__ import annotations

from worker.acl.redis_user import RedisUser

# On connecting, and in between. INFO is for `millrace doctor` and for kombu.
_CONNECTION = ("hello", "auth", "select", "ping", "info")
# No EVAL: scripts are loaded, then named by their digest.
_SCRIPTS = ("script|load", "script|exists", "evalsha")
# A Celery producer's: declare the queue, look how long it is, send.
_SENDING = ("sadd", "smembers", "llen", "lpush", "multi", "exec")
# Those of stage, submit, discard and cancel, and of claim, put, renew and release, with which cancelling ends the
# units that nobody runs.
_JOBS = (
    *("del", "exists", "expire", "get", "persist", "pexpire", "set", "time", "unlink"),
    *("hdel", "hexists", "hget", "hgetall", "hincrby", "hkeys", "hlen", "hmget", "hset", "hsetnx", "hstrlen"),
    *("lrange", "rpush", "zadd", "zrange", "zrevrange", "zrem", "zremrangebyrank"),
)

_QUEUE_KEYS = (
    "millrace",
    "millrace??[0-9]",
    "_kombu.binding.millrace",
    "_kombu.binding_permanent.millrace",
)  # the lanes end in \x06\x16 and a step
# A job's keys; units to look at, queued shards, admission, the list of jobs, dead units, producers' own keys for jobs.
_JOB_KEYS = tuple(
    f"millrace:{{*}}:{part}" for part in ("j:*", "open", "queued*", "adm*", "jobs", "dead", "idem:*", "w:*")
)

# SCAN, by which producers find the workers, shows the names of all keys, though not what they hold.
PRODUCER = RedisUser(
    "millrace-producer", (*_JOB_KEYS, *_QUEUE_KEYS), (*_CONNECTION, *_SCRIPTS, *_SENDING, *_JOBS, "scan")
)

# Celery's events, for Flower: kombu's channel of a topic in each of the databases that Redis has by default.
_EVENT_CHANNELS = tuple(f"/{database}.celeryev/*" for database in range(16))

# Beside a producer's: taking messages, giving them back, choosing a shard, the reaper's look at what is due,
# the list of bad frames, how long the queue is (metrics).
_CONSUMING = ("brpop", "watch", "unwatch", "discard", "zrangebyscore", "zrevrangebyscore", "zscore", "zcard", "ltrim")
WORKER = RedisUser(
    "millrace-worker",
    ("millrace:{*}:*", *_QUEUE_KEYS, "unacked", "unacked_index", "unacked_mutex"),
    (*_CONNECTION, *_SCRIPTS, *_SENDING, *_JOBS, *_CONSUMING, "publish"),
    _EVENT_CHANNELS,
)

# Hears events, and can neither send anything nor read a job or the queue. kombu notes the channel it listens to in a
# set, and takes the note back, with the queue that it never was, when it closes.
FLOWER = RedisUser(
    "millrace-flower",
    ("_kombu.binding.celeryev", "_kombu.binding_permanent.celeryev", "celeryev.*"),
    (*_CONNECTION, "psubscribe", "punsubscribe", "llen", "sadd", "srem", "del", "multi", "exec"),
    _EVENT_CHANNELS,
)

# For people: backups, CONFIG, ACL LOG.
ADMIN = RedisUser("millrace-admin", ("*",), ("@all",))
