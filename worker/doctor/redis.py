"""Judges what a Redis says of itself, who may do what there, and which workers are alive."""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import Iterator, Mapping

import redis
from pydantic import ValidationError

from settings import RedisSettings, SettingsError
from worker.doctor.redis_facts import NUM_ROUND_TRIPS, RedisFacts, connect_once
from worker.doctor.report import Finding, Level
from worker.registry.errors import LOAD_FUNCTIONS
from worker.registry.exchange import NOT_FOUND, ask, is_without_functions, perform, text_fields
from worker.registry.jobs import JobQueries
from worker.registry.keys import Keys
from worker.registry.lua import Argument, call_of_nothing, library_name
from worker.registry.models import ServedModels
from worker.registry.queues import QUEUE, queue_of
from worker.schemas import JobFilter, JobState, WorkerInfo

OLDEST_REDIS = (6, 2)  # celery 5.7

# The users of `millrace acl` have none of these, each of which lets a stolen password do more than use the queue.
_DANGEROUS = frozenset(
    (
        *("+@admin", "+@dangerous", "+acl", "+config", "+debug", "+module", "+migrate", "+replicaof", "+slaveof"),
        *("+shutdown", "+flushall", "+flushdb", "+keys", "+restore", "+eval", "+monitor", "+client"),
    )
)
_USERS = "give producers and workers the users of `millrace acl` (redis-server --aclfile)"
PERMISSIONS_FIX = "load the users that `millrace acl` prints, or give this one what it lacks"

_GETTING_FULL = 0.8
_FULL = 0.95

_TURN_ON = "redis-cli CONFIG SET appendonly yes, and appendonly yes in redis.conf"
_DISK = "free space on Redis's disk and see its log"

# Claiming a shard, writing its records and ending it are a round trip each; on one machine it takes 0.1 ms.
SLOW_ROUND_TRIP_S = 0.02
# With clocks within a second, records of several machines can still be compared.
CLOCK_TOLERANCE_S = 1.0

MAX_JOBS = 1000  # open ones, of which is told what they wait for

_START = "start one: millrace worker --model DIR"


def redis_findings(settings: RedisSettings, shown_url: str, *, for_worker: bool = False) -> Iterator[Finding]:
    """Everything about this Redis. `shown_url` has no password; `for_worker`: this machine is to be a worker."""
    try:
        client = connect_once(settings)
    except SettingsError as error:
        yield Finding("redis", Level.FAILED, str(error), "set what the line names")
        return
    with client:
        try:
            facts = RedisFacts.ask(client, settings)
        except redis.RedisError as error:
            yield Finding("redis", Level.FAILED, f"{shown_url}: {error}", _way_in(error))
            return
        yield Finding("redis", Level.OK, f"{shown_url} answers")
        yield from server_findings(facts.info)
        yield from persistence_findings(facts)
        yield from memory_findings(facts)
        yield from network_findings(facts)
        yield from access_findings(facts, settings)
        yield from _of_the_queue(client, facts, for_worker=for_worker)


def _of_the_queue(client: redis.Redis, facts: RedisFacts, *, for_worker: bool) -> Iterator[Finding]:
    try:
        work = permissions(client, for_worker=for_worker)
        yield work
        if work.level is Level.OK:
            yield from function_findings(client, for_worker=for_worker)
            yield from model_findings(client, Keys())
        if work.level is Level.OK and facts.may_look_around:
            yield from worker_findings(client, Keys())
    except redis.RedisError as error:  # it answers, but not about our keys
        yield Finding("redis queue", Level.FAILED, str(error), "mend what is said above of this Redis")


def _way_in(error: redis.RedisError) -> str:
    if isinstance(error, redis.AuthenticationError | redis.exceptions.AuthenticationWrongNumberOfArgsError):
        return "give the user and the password of the ACL file: redis.url, or redis.password_file"
    if isinstance(error, redis.exceptions.NoPermissionError):
        return PERMISSIONS_FIX
    causes = (error.__cause__, error.__context__)
    if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes):
        return "set redis.ca_file to the CA that signed the server's certificate, and redis.url to a name it holds"
    if any(isinstance(cause, ssl.SSLError) or "handshake" in str(cause) for cause in causes):
        return "set redis.url=redis://... if this port is not encrypted, or serve TLS there (worker/compose.tls.yaml)"
    if isinstance(error, redis.BusyLoadingError):
        return "wait until it has read its file from disk"
    return "start redis-server there, or set redis.url (MILLRACE_REDIS__URL, --redis-url); rediss:// if it is encrypted"


def server_findings(info: Mapping[str, str]) -> Iterator[Finding]:
    """Version, role and cluster, from INFO."""
    yield _version(info)
    yield _role(info)
    if info.get("cluster_enabled") == "1":
        yield Finding(
            "redis cluster",
            Level.FAILED,
            "Redis Cluster: the queue's keys would lie on several nodes",
            "use a Redis that is not a cluster (cluster-enabled no)",
        )


def _version(info: Mapping[str, str]) -> Finding:
    valkey = info.get("valkey_version")
    if valkey is not None:  # it forked from Redis 7.2 and has said redis_version:7.2.4 ever since
        return Finding("redis version", Level.OK, f"Valkey {valkey}")
    shown = info.get("redis_version", "unknown")
    major, minor, *_ = (*(int(part) if part.isdecimal() else 0 for part in shown.split(".")), 0)
    if (major, minor) >= OLDEST_REDIS:
        return Finding("redis version", Level.OK, f"Redis {shown}")
    oldest = ".".join(map(str, OLDEST_REDIS))
    return Finding("redis version", Level.FAILED, f"Redis {shown} is too old", f"install Redis {oldest} or later")


def _role(info: Mapping[str, str]) -> Finding:
    if info.get("role") != "slave":
        return Finding("redis role", Level.OK, f"primary, with {info.get('connected_slaves', '0')} replicas")
    primary = f"{info.get('master_host')}:{info.get('master_port')}"
    if info.get("slave_read_only") == "1":
        return Finding("redis role", Level.FAILED, f"a replica of {primary}: it takes no writes", "use the primary")
    return Finding("redis role", Level.FAILED, f"a replica of {primary}, which will undo its writes", "use the primary")


def memory_findings(facts: RedisFacts) -> Iterator[Finding]:
    """Eviction policy, then use against the limit."""
    yield _eviction(facts)
    yield _use(facts)


def _eviction(facts: RedisFacts) -> Finding:
    server = facts.server
    if not server.may_evict:
        return Finding("redis eviction", Level.OK, "noeviction")
    return Finding(
        "redis eviction",
        Level.FAILED if server.max_memory_bytes else Level.WARNING,
        f"{server.eviction_policy}: under memory pressure Redis drops jobs and results",
        "redis-cli CONFIG SET maxmemory-policy noeviction, and the same in redis.conf",
    )


def _use(facts: RedisFacts) -> Finding:
    used, limit, machine = (facts.count(name) for name in ("used_memory", "maxmemory", "total_system_memory"))
    if limit and machine and limit > machine:
        return Finding(
            "redis memory",
            Level.WARNING,
            f"maxmemory is {_mib(limit)}, its machine has {_mib(machine)}: the kernel will end Redis first",
            f"redis-cli CONFIG SET maxmemory {machine // 2}, and the same in redis.conf",
        )
    most = limit or machine
    share = used / most if most else 0.0
    of_what = "maxmemory" if limit else "its machine's memory (maxmemory is not set)"
    detail = f"{_mib(used)} of {_mib(most)}, {of_what}" if most else f"{_mib(used)}; maxmemory is not set"
    if share < _GETTING_FULL:
        return Finding("redis memory", Level.OK, detail)
    level = Level.FAILED if share >= _FULL else Level.WARNING
    fix = "raise maxmemory, or lower redis.result_ttl_s, limits.max_open_bytes or limits.max_open_jobs"
    return Finding("redis memory", level, f"{detail}: when it is full, no job is accepted and no record written", fix)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"


def persistence_findings(facts: RedisFacts) -> Iterator[Finding]:
    """What is kept on disk, and each write to it that failed."""
    yield _append_only(facts)
    info = facts.info
    if info.get("aof_enabled") == "1" and info.get("aof_last_write_status", "ok") != "ok":
        yield Finding("redis disk", Level.FAILED, "the last append failed: Redis refuses to write", _DISK)
    if info.get("aof_enabled") == "1" and info.get("aof_last_bgrewrite_status", "ok") != "ok":
        yield Finding("redis disk", Level.WARNING, "the append-only file could not be rewritten: it grows", _DISK)
    if info.get("rdb_last_bgsave_status", "ok") != "ok":
        yield _failed_snapshot(facts)


def _append_only(facts: RedisFacts) -> Finding:
    lost = facts.server.lost_at_its_end
    if lost:
        if facts.config:  # which tells of snapshots to come, and of one made by hand that no other will follow
            lost = "what came after the last snapshot" if facts.config.get("save") else "all jobs and results"
        detail = f"append-only file is off: a restart of Redis loses {lost}"
        return Finding("redis persistence", Level.WARNING, detail, _TURN_ON)
    flushed = facts.config.get("appendfsync")
    if flushed == "no":
        return Finding(
            "redis persistence",
            Level.WARNING,
            "append-only file is on and flushed when the kernel likes: a power failure loses half a minute",
            "redis-cli CONFIG SET appendfsync everysec, and the same in redis.conf",
        )
    how = f", appendfsync {flushed}" if flushed else "; appendfsync is not shown to this user"
    return Finding("redis persistence", Level.OK, f"append-only file is on{how}")


def _failed_snapshot(facts: RedisFacts) -> Finding:
    # Redis refuses writes only if it is to save by itself, which is the default.
    refuses = facts.config.get("save") != "" and facts.config.get("stop-writes-on-bgsave-error") != "no"
    level = Level.FAILED if refuses else Level.WARNING
    return Finding(
        "redis disk", level, f"the last snapshot failed{': Redis refuses to write' if refuses else ''}", _DISK
    )


def network_findings(facts: RedisFacts) -> Iterator[Finding]:
    """Round trip and clock."""
    detail = f"{facts.round_trip_s * 1000:.2f} ms, the median of {NUM_ROUND_TRIPS} round trips"
    if facts.round_trip_s < SLOW_ROUND_TRIP_S:
        yield Finding("redis latency", Level.OK, detail)
    else:
        fix = "run Redis nearer to its workers; see redis-cli --latency and SLOWLOG GET for what else keeps it busy"
        yield Finding("redis latency", Level.WARNING, f"{detail}: claims and records wait for it", fix)
    yield _clock(facts.clock_offset_s)


def _clock(offset_s: float) -> Finding:
    detail = f"Redis's is {abs(offset_s) * 1000:,.0f} ms {'ahead of' if offset_s >= 0 else 'behind'} this machine's"
    if abs(offset_s) <= CLOCK_TOLERANCE_S:
        return Finding("clock", Level.OK, detail)
    return Finding(
        "clock",
        Level.WARNING,
        f"{detail}: logs, spans and the order of job ids do not fit together, and certificates may seem out of date; "
        "leases, deadlines and ageing go by Redis's clock alone",
        "set both machines' clocks by NTP (timedatectl set-ntp true)",
    )


def access_findings(facts: RedisFacts, settings: RedisSettings) -> Iterator[Finding]:
    """Who gets in, what we may do beyond our work, what is encrypted, who may read the password."""
    yield _default_user(facts)
    yield _user(facts)
    yield _encryption(facts)
    if facts.config.get("enable-debug-command") == "yes":
        yield Finding(
            "redis protected settings",
            Level.WARNING,
            "enable-debug-command yes: whoever may DEBUG may stop or read the server",
            "set enable-debug-command no in redis.conf and restart Redis",
        )
    file = settings.password_file
    if file is not None and file.stat().st_mode & 0o077:
        detail = f"{file}: others on this machine may read the password"
        yield Finding("redis password file", Level.WARNING, detail, f"chmod 600 {file}")


def permissions(client: redis.Redis, *, for_worker: bool) -> Finding:
    """Whether this user may do a producer's or a worker's work, found out by reading.

    Tries only what is needed, since Redis logs each denial (ACL LOG).
    """
    keys = Keys()
    calls: list[tuple[str | int, ...]] = [
        ("HGETALL", keys.counters),
        ("ZRANGE", keys.jobs, 0, 0),
        ("LLEN", QUEUE),
    ]
    if for_worker:
        calls += [("EXISTS", "unacked"), ("LLEN", queue_of("-"))]  # of no model; an older ACL file has no such keys
    else:
        calls += [("SCAN", 0)]
    denied = [" ".join(map(str, call[:2])) for call in calls if not _may(client, *call)]
    if not _may(client, *call_of_nothing()) and not _may(client, "SCRIPT", "EXISTS", "0" * 40):
        denied.append("FCALL")
    who = "a worker" if for_worker else "a producer"
    if denied:
        return Finding("redis permissions", Level.FAILED, f"{who} needs {', '.join(denied)}", PERMISSIONS_FIX)
    return Finding("redis permissions", Level.OK, f"{who} may do its work")


def _may(client: redis.Redis, *call: Argument) -> bool:
    try:
        client.execute_command(*call)  # type: ignore[no-untyped-call]  # redis-py has no types here
    except redis.exceptions.NoPermissionError:
        return False
    except redis.ResponseError as error:  # of a function: before Redis 7.0 there are none
        if not (is_without_functions(error) or str(error) == NOT_FOUND):
            raise
    return True


def function_findings(client: redis.Redis, *, for_worker: bool) -> Iterator[Finding]:
    """Whether this version's functions are there. Raises redis.RedisError."""
    try:
        client.execute_command(*call_of_nothing())  # type: ignore[no-untyped-call]  # nor here
    except redis.exceptions.NoPermissionError:
        yield Finding(
            "redis functions", Level.WARNING, "this user may not call them, and sends scripts instead", _USERS
        )
    except redis.ResponseError as error:
        if is_without_functions(error):
            detail = "none before Redis 7.0: whoever may submit may stop it by a script that does not end"
            yield Finding("redis functions", Level.OK, detail)
        elif str(error) != NOT_FOUND:
            raise
        elif for_worker:
            yield Finding("redis functions", Level.OK, f"{library_name()} is loaded when a worker starts")
        else:
            detail = f"{library_name()} is not there: a producer that may not load it cannot submit"
            yield Finding(
                "redis functions", Level.WARNING, detail, f"{_START}, or {LOAD_FUNCTIONS} as an administrator"
            )
    else:
        yield Finding("redis functions", Level.OK, f"{library_name()} is there")


def _default_user(facts: RedisFacts) -> Finding:
    if not facts.lets_anyone_in:
        return Finding("redis default user", Level.OK, "off, or with a password")
    reach = "whoever reaches the port" if facts.config.get("protected-mode") != "yes" else "everybody on its machine"
    return Finding("redis default user", Level.WARNING, f"needs no password: {reach} may read every prompt", _USERS)


def _user(facts: RedisFacts) -> Finding:
    user, rules = facts.user, facts.rules
    # _default_user has already reported one without a password.
    if rules is None or (user == "default" and facts.lets_anyone_in):
        return Finding("redis user", Level.OK, f"we are {user}")
    # Redis 6.2 writes -@dangerous as -@admin and the commands beside it.
    everything = "+@all" in rules and rules.isdisjoint({"-@dangerous", "-@admin"})
    beyond = ["+@all"] if everything else sorted(rules & _DANGEROUS)
    if not beyond:
        return Finding("redis user", Level.OK, f"we are {user}, with no more than it needs")
    detail = f"we are {user}, with more than our work needs: {' '.join(beyond)}"
    return Finding("redis user", Level.WARNING, detail, _USERS)


def _encryption(facts: RedisFacts) -> Finding:
    if facts.address.is_tls:
        return Finding("redis encryption", Level.OK, "TLS, with the server's certificate and name checked")
    if facts.address.is_on_this_machine:
        return Finding("redis encryption", Level.OK, "none; it does not leave this machine")
    return Finding(
        "redis encryption",
        Level.WARNING,
        "none: the network in between carries the password, every prompt and every answer in the clear",
        "redis.url=rediss://... and TLS in Redis (worker/compose.tls.yaml), unless the network is all your own",
    )


def worker_findings(client: redis.Redis, keys: Keys) -> Iterator[Finding]:
    """Workers with a heartbeat, their versions, and jobs that wait for one. Raises redis.RedisError."""
    waiting = int(text_fields(client.hgetall(keys.counters)).get("jobs", "0"))
    try:
        workers = perform(client, JobQueries(keys).workers())
    except ValidationError:  # a heartbeat with fields that this version does not know, or without those it does
        fix = "run one version everywhere: upgrade this machine or the workers"
        yield Finding("workers", Level.WARNING, "one of another version than this machine's is up", fix)
        return
    if workers:
        yield _alive(workers)
    elif waiting:
        wait = "job waits" if waiting == 1 else "jobs wait"
        yield Finding("workers", Level.WARNING, f"none is up, and {waiting} {wait} for one", _START)
    else:
        yield Finding("workers", Level.OK, "none is up, and no job waits")


def model_findings(client: redis.Redis, keys: Keys) -> Iterator[Finding]:
    """Models whose workers differ, and those that open jobs wait for. Raises redis.RedisError."""
    served = ServedModels.of_answers(ask(client, ServedModels.questions(keys)))
    for model, contexts in served.contexts.items():
        if len(contexts) > 1:
            detail = f"workers of {model} take {' or '.join(f'{tokens:,}' for tokens in contexts)} tokens a request"
            fix = "give them one engine.max_model_len: a long line fails on one of them and not on another"
            yield Finding("models", Level.WARNING, detail, fix)
    is_open = JobFilter(states=tuple(state for state in JobState if not state.is_terminal))
    jobs = perform(client, JobQueries(keys).jobs(MAX_JOBS, is_open))
    for model, count in sorted(Counter(model for job in jobs for model in job.waiting_for).items()):
        detail = f"no worker serves {model}, for which {count} {'job waits' if count == 1 else 'jobs wait'}"
        yield Finding("models", Level.WARNING, detail, f"{_START}, or cancel what waits: millrace cancel JOB")


def _alive(workers: list[WorkerInfo]) -> Finding:
    versions = sorted({worker.version for worker in workers})
    models = sorted({worker.model for worker in workers})
    detail = f"{len(workers)} up, version {', '.join(versions)}, with {', '.join(models)}"
    if len(versions) > 1:
        return Finding("workers", Level.WARNING, detail, "upgrade the older ones: millrace worker of one version")
    return Finding("workers", Level.OK, detail)
