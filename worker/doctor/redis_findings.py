"""What `millrace doctor` asks Redis."""

from __future__ import annotations

import ssl
from collections.abc import Iterator

import redis

from settings import RedisSettings, SettingsError
from worker.doctor.check_access import PERMISSIONS_FIX, access_findings, permissions
from worker.doctor.check_memory import memory_findings
from worker.doctor.check_network import network_findings
from worker.doctor.check_persistence import persistence_findings
from worker.doctor.check_server import server_findings
from worker.doctor.check_workers import worker_findings
from worker.doctor.finding import Finding
from worker.doctor.level import Level
from worker.doctor.redis_facts import RedisFacts, connect_once
from worker.registry.keys import Keys


def redis_findings(settings: RedisSettings, shown_url: str, *, for_worker: bool = False) -> Iterator[Finding]:
    """Everything about this Redis. `shown_url` has its password masked; `for_worker`: we are to be a worker here."""
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
        if work.level is Level.OK and facts.may_look_around:
            yield from worker_findings(client, Keys())
    except redis.RedisError as error:  # it answers, and not about our keys
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
