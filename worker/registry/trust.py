"""Judges what a Redis may be trusted with, and waits until it has what it acknowledged where `redis.ack` wants it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import redis

from settings import RedisSettings, SettingsError
from settings.redis import Ack
from worker.registry.errors import NotDurable
from worker.registry.exchange import ask
from worker.registry.keys import Keys
from worker.registry.lua import Scripts

_HAS_WAITAOF = (7, 2)

ASK_AGAIN_S = 60.0  # for a new append-only file, where the last one failed: a full disk stays full for a while
REFUSED_S = 3600.0  # likewise where Redis refused: its administrator must be there first

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RedisServer:
    """What a server's INFO says of whether it keeps what it has acknowledged."""

    version: tuple[int, int]  # that whose commands it has
    eviction_policy: str
    max_memory_bytes: int  # 0: no limit, so that nothing is ever evicted
    has_append_only_file: bool
    has_saved: bool  # a snapshot, since it was started
    num_replicas: int

    @classmethod
    def of_info(cls, info: Mapping[str, object]) -> Self:
        """Of INFO's fields; one that this server does not give counts as not there."""
        major, minor, *_ = (
            *(int(part) if part.isdecimal() else 0 for part in f"{info.get('redis_version')}".split(".")),
            0,
        )
        return cls(
            version=(major, minor),
            eviction_policy=str(info.get("maxmemory_policy", "unknown")),
            max_memory_bytes=int(str(info.get("maxmemory", 0))),
            has_append_only_file=str(info.get("aof_enabled")) == "1",
            has_saved=str(info.get("rdb_last_bgsave_time_sec", -1)) != "-1",
            num_replicas=int(str(info.get("connected_slaves", 0))),
        )

    @property
    def may_evict(self) -> bool:
        """Whether it is set to drop keys once it has a limit and reaches it."""
        return self.eviction_policy != "noeviction"

    @property
    def lost_at_its_end(self) -> str:
        """What it forgets when it ends, beside at most a second of writes; "": nothing."""
        if self.has_append_only_file:
            return ""
        return "what came after the last snapshot" if self.has_saved else "all jobs and results"

    def check(self, settings: RedisSettings) -> None:
        """Raise SettingsError for a server that drops jobs, warn of one that forgets them, unless it is allowed to."""
        if settings.allow_unsafe:
            return
        if self.may_evict and self.max_memory_bytes:
            raise SettingsError(
                "Redis's maxmemory-policy",
                self.eviction_policy,
                "a full Redis drops jobs and results",
                accepted="noeviction (redis-cli CONFIG SET maxmemory-policy noeviction), or redis.allow_unsafe=true",
            )
        if self.may_evict:
            logger.warning("Redis's maxmemory-policy is %s: with a maxmemory it would drop jobs", self.eviction_policy)
        if self.lost_at_its_end:
            logger.warning(
                "Redis keeps no append-only file: when it ends it loses %s (redis.allow_unsafe=true says it may)",
                self.lost_at_its_end,
            )

    def check_ack(self, ack: Ack) -> None:
        """Raise SettingsError for a server that cannot acknowledge so."""
        if ack == "disk" and self.version < _HAS_WAITAOF:
            shown = ".".join(map(str, self.version))
            raise _ack_refused(ack, f"Redis {shown} cannot say when its disk has something", "Redis 7.2 or later")
        if ack == "disk" and not self.has_append_only_file:
            raise _ack_refused(ack, "Redis keeps no append-only file", "appendonly yes in redis.conf")
        if ack == "replica" and not self.num_replicas:
            raise _ack_refused(ack, "Redis has no replica", "a primary with a connected replica")


def _ack_refused(ack: Ack, problem: str, accepted: str) -> SettingsError:
    return SettingsError("redis.ack", ack, problem, accepted=f"{accepted}, or redis.ack=memory")


class Trust:
    """Looks once whether a server may be trusted with jobs, and waits until it has one where `redis.ack` wants it."""

    def __init__(self, client: redis.Redis, keys: Keys, settings: RedisSettings) -> None:
        self._client = client
        self._keys = keys
        self._settings = settings
        self._server: RedisServer | None = None

    def check(self) -> None:
        """Look, the first time. Raises SettingsError, see RedisServer.check and check_ack, and redis.RedisError."""
        if self._server is None:
            server = RedisServer.of_info(self._client.info())
            server.check(self._settings)
            server.check_ack(self._settings.ack)
            self._server = server

    def check_ack(self) -> None:
        """Look whether Redis can acknowledge as redis.ack says; a job can be cancelled in any Redis without it."""
        if self._server is None and self._settings.ack != "memory":
            RedisServer.of_info(self._client.info()).check_ack(self._settings.ack)

    def wait_until_durable(self, job_id: str, done: str) -> None:
        """Wait for what this job has become, `done`. Raises NotDurable after half of redis.socket_timeout_s."""
        ack = self._settings.ack
        if ack == "memory":
            return
        timeout_s = self._settings.socket_timeout_s / 2
        timeout_ms = round(timeout_s * 1000)
        wait = ("WAITAOF", 1, 0, timeout_ms) if ack == "disk" else ("WAIT", 1, timeout_ms)
        # Redis waits for the last write of the same connection, and so for all before it, by whatever connection: a
        # pool's may have written nothing yet, for which Redis answers at once.
        _, answer = ask(self._client, [Scripts.ACKNOWLEDGE(self._keys.of_queue_scripts(), ack=ack), wait])
        if (answer[0] if ack == "disk" else answer) < 1:
            raise NotDurable(job_id, done, ack, timeout_s)


class AppendOnlyFile:
    """Has Redis write its append-only file anew once after each of its starts.

    A power cut may end the file within what one script wrote. Redis leaves that out, but where it ends within a command
    its beginning stays in the file and what comes next is written behind it (6.2 and 7.0 do so; valkey#4342). With the
    start after that the beginning is there after all: the counters of 16 prompts were given back twice.
    """

    def __init__(self, client: redis.Redis, *, ask_again_s: float = ASK_AGAIN_S) -> None:
        self._client = client
        self._ask_again_s = ask_again_s
        self._asked = ""  # which start of Redis (its run_id) it was asked for
        self._ask_at_s = -math.inf  # time.monotonic() from which on that may be again

    def renew(self) -> None:
        """Ask for it if Redis has not written it since its start and is not about to.

        Raises redis.RedisError when Redis cannot be had; a refusal is logged, and asked again after REFUSED_S.
        """
        info = self._client.info()
        if not RedisServer.of_info(info).has_append_only_file or has_renewed(info):
            return
        if info.get("aof_rewrite_in_progress") or info.get("aof_rewrite_scheduled"):
            return
        run_id = str(info.get("run_id"))
        if run_id == self._asked and time.monotonic() < self._ask_at_s:
            return
        self._asked = run_id
        self._ask_at_s = time.monotonic() + self._ask_again_s
        try:
            self._client.bgrewriteaof()
        except redis.ResponseError as error:
            if "in progress" not in str(error):  # another worker's
                self._ask_at_s = time.monotonic() + REFUSED_S
                logger.warning("Redis does not write its append-only file anew, see OPERATIONS: %s", error)
        else:
            logger.info("Redis writes its append-only file anew, for the first time since its start")


def has_renewed(info: Mapping[str, object]) -> bool:
    """Whether a server has written its file anew since it started, by INFO; not where the last time failed."""
    is_first = str(info.get("aof_last_rewrite_time_sec", -1)) == "-1"
    return not is_first and info.get("aof_last_bgrewrite_status") == "ok"
