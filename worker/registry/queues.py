"""Reads what waits: message queues and their lanes, shards that nobody holds, units that nobody runs, backlogs."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import redis

from worker.registry.exchange import RedisReply, ask, ask_one, text
from worker.registry.keys import Keys, UnitRef
from worker.registry.leases import Claim
from worker.registry.lua import Scripts
from worker.registry.models import TTL_S, ModelDirectory
from worker.registry.trust import AppendOnlyFile

QUEUE = "millrace"  # of plans, which any worker makes, and of shards that no model is noted of

# A message of priority p waits in the lane of the greatest step that is not above p; 0 is taken first.
PRIORITY_STEPS = (0, 3, 6, 9)
# Plans go first, whatever their job's priority: a plan is short, and would wait behind shards that wait for a slot.
PLAN_PRIORITY = 0
_SEPARATOR = "\x06\x16"  # kombu's, between the queue's name and the step
_PLAIN_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")

HINT, NONE = "hint", "none"

LONGEST_GRACE_S = 600.0  # the doubling of the grace ends here
STALE_S = 600.0  # a unit that waited this long is announced again even while its lane is not empty
UNSERVED_S = (
    30.0  # between looks at a shard whose model nobody serves; its message waits where that model's workers look
)
MAX_UNITS = 100  # in one look: bounds the script's time

MAX_SHARDS = 500  # read in one look: bounds the time for which Redis does nothing else
MAX_JOBS = 500  # asked about in one round trip


def queue_of(model: str) -> str:
    """The message queue of a model's shards; "": of no model. A name that is no plain word is hashed."""
    if not model:
        return QUEUE
    if _PLAIN_NAME.fullmatch(model) is None:
        model = f"sha256-{hashlib.sha256(model.encode()).hexdigest()[:32]}"
    return f"{QUEUE}.{model}"


def steps_by_priority() -> list[int]:
    """For priorities 0 .. 9, the step of the lane in which their messages wait."""
    return [max(step for step in PRIORITY_STEPS if step <= priority) for priority in range(10)]


def lanes_by_priority(queue: str = QUEUE) -> list[str]:
    """For priorities 0 .. 9, the Redis list in which the queue's messages wait."""
    return [f"{queue}{_SEPARATOR}{step}" if step else queue for step in steps_by_priority()]


class ShardQueue:
    """Chooses which queued shard a worker should claim next. Raises redis.RedisError when Redis cannot be had."""

    def __init__(self, client: redis.Redis, keys: Keys, *, ageing_s: float, models: Sequence[str] = ()) -> None:
        """`models`: the names of the one that is served here."""
        self._client = client
        self._keys = keys
        self._ageing_ms = round(ageing_s * 1000)
        self._models = tuple(models)

    def choose(self, hint: UnitRef | None, held: Iterable[Claim], *, only_new_tenants: bool) -> UnitRef | None:
        """The shard that a worker with these leases claims on a message about `hint`; None if it may claim none.

        Of the shards of its model, and of those without one: first the tenant with the fewest prompts here; then its
        shard whose turn is earliest, by time and priority, or rather the next in prefix order of those within a step of
        priority. `only_new_tenants`: no tenant that has shards here. It is `hint` if none is queued, and may turn out
        not to be claimable. `hint` is None for a worker that comes without a message.
        """
        unit = UnitRef.shard(f"{self._keys.shard}-{uuid.UUID(int=0)}", 0) if hint is None else hint  # of no job
        here: dict[str, tuple[int, str]] = {}
        for claim in held:
            here[claim.tenant] = (here.get(claim.tenant, (0, ""))[0] + len(claim.missing), claim.head)
        call = Scripts.CHOOSE(
            self._keys.of_unit_scripts(unit),
            [(tenant, num_prompts, head) for tenant, (num_prompts, head) in here.items()],
            prefix=self._keys.prefix,
            only_new_tenants=int(only_new_tenants),
            ageing_ms=self._ageing_ms,
            hint=str(unit),
            models=json.dumps(self._models),
        )
        answer = text(ask_one(self._client, call))
        if answer == NONE:
            return None
        return hint if answer == HINT else UnitRef.of_member(answer)

    def has_messages(self) -> bool:
        """Whether messages about shards of this model wait; those of plans bring no worker to a shard."""
        found = _messages(self._client, self._models)
        return any(any(lanes.values()) for lanes in found.values())

    @property
    def model(self) -> str:
        """The name of the model that is served here; "": of none."""
        return self._models[0] if self._models else ""


@dataclass(frozen=True, slots=True)
class DueUnit:
    """A unit nobody runs: its message may be lost, its worker dead, or its job cancelled or expired."""

    ref: UnitRef
    priority: int  # its job's, 0 first .. 9 last
    should_close: bool  # write its error records; otherwise announce it again
    model: str = ""  # a shard's; "": a plan, or planned by an older version


class ReapQueue:
    """Finds units to announce again or to close. Raises redis.RedisError when Redis cannot be had."""

    def __init__(
        self, directory: ModelDirectory, keys: Keys, *, grace_s: float, ageing_s: float, patience_s: float
    ) -> None:
        """`patience_s`: for how long the holder of a lease that ran out must be silent to count as dead."""
        self._directory = directory
        self._client = directory.client
        self._keys = keys
        self._grace_ms = round(grace_s * 1000)
        self._ageing_ms = round(ageing_s * 1000)  # of waiting, worth one step of priority
        self._patience_ms = round(patience_s * 1000)
        self.file = AppendOnlyFile(self._client)

    def due(self) -> list[DueUnit]:
        """Units that are due now, of models that are served. Each is put off by its grace: only one caller gets it."""
        steps = steps_by_priority()
        found = _messages(self._client, ("", *self._directory.read().names))
        call = Scripts.REAP(
            self._keys.of_queue_scripts(),
            [(model, json.dumps([lanes[step] for step in steps])) for model, lanes in found.items()],
            prefix=self._keys.prefix,
            max_units=MAX_UNITS,
            grace_ms=self._grace_ms,
            longest_grace_ms=round(LONGEST_GRACE_S * 1000),
            stale_ms=round(STALE_S * 1000),
            unserved_ms=round(UNSERVED_S * 1000),
            plan_priority=PLAN_PRIORITY,
            ageing_ms=self._ageing_ms,
            steps=json.dumps(steps),
            patience_ms=self._patience_ms,
            served_ttl_ms=TTL_S * 1000,
        )
        words = [text(word) for word in ask_one(self._client, call)]
        return [
            DueUnit(UnitRef.of_member(member), should_close=action == "close", priority=int(priority), model=model)
            for member, action, priority, model in zip(words[::4], words[1::4], words[2::4], words[3::4], strict=True)
        ]

    def lost_plans(self) -> list[UnitRef]:
        """Plans to announce, of open jobs that had neither plan nor shards though lines of them have no record."""
        fields = ("st", "n", "ok", "err", "ns", "sd")
        found: list[UnitRef] = []
        [members] = ask(self._client, [("ZREVRANGE", self._keys.jobs, 0, -1)])
        job_ids = [text(member) for member in members]
        for start in range(0, len(job_ids), MAX_JOBS):
            chunk = job_ids[start : start + MAX_JOBS]
            rows = ask(self._client, [("HMGET", self._keys.job(job_id), *fields) for job_id in chunk])
            suspects = [UnitRef.plan(job_id) for job_id, row in zip(chunk, rows, strict=True) if _may_be_lost(row)]
            calls = [Scripts.MEND(self._keys.of_unit_scripts(ref), job_id=ref.job_id) for ref in suspects]
            found += [ref for ref, is_lost in zip(suspects, ask(self._client, calls), strict=True) if is_lost]
        return found

    def has_messages(self) -> bool:
        """Whether messages wait that this worker takes."""
        found = _messages(self._client, ("", *self._directory.own_names))
        return any(any(lanes.values()) for lanes in found.values())


@dataclass(frozen=True, slots=True)
class TenantBacklog:
    """A tenant's shards of one model that nobody holds, as far as they were read."""

    tenant: str
    model: str  # "": planned by an older version
    open_prompts: int  # of all the tenant's jobs, without a record
    waiting: Mapping[int, tuple[int, float]]  # by priority: shards, and for how many seconds the oldest has waited
    num_unread: int  # more shards, of which only the number is known


@dataclass(frozen=True, slots=True)
class QueueReading:
    """How much work there is in Redis. Counters are of all time, all workers and all producers."""

    open_jobs: int
    open_prompts: int  # without a record
    open_bytes: int  # of those jobs' lines
    open_units: int  # plans and shards that are not finished
    overdue_s: float  # how long the first of them has been due for a look that nobody gave it
    backlogs: tuple[TenantBacklog, ...]  # of the tenants and models with the most waiting shards
    other_waiting_shards: Mapping[str, int]  # by model: of all its other tenants together
    num_waiting_tenants: int
    messages: Mapping[str, Mapping[int, int]]  # by model, "" for plans: in the broker's lanes, by the lane's step
    submitted_jobs: int
    submitted_prompts: int
    ended_jobs: Mapping[str, int]  # by state, see JobState
    num_records: int
    num_dead_units: int  # given up, of the last week
    num_dead_frames: int  # that were no message
    waiting_callbacks: int  # not sent yet
    dead_callbacks: int  # given up, of the last week
    sent_callbacks: int


class QueueFigures:
    """Reads the queue's figures in three round trips, changing nothing. Raises redis.RedisError."""

    def __init__(self, directory: ModelDirectory, keys: Keys, *, max_tenants: int) -> None:
        self._directory = directory
        self._client = directory.client
        self._keys = keys
        self._max_tenants = max_tenants  # told apart, pairs of tenant and model

    def read(self) -> QueueReading:
        """The queue at this moment."""
        call = Scripts.QUEUE_FIGURES(
            self._keys.of_queue_scripts(),
            prefix=self._keys.prefix,
            max_tenants=self._max_tenants,
            max_shards=MAX_SHARDS,
        )
        reply = ask_one(self._client, call)
        num_units, overdue_ms, num_dead, num_tenants, counters, rows, others, *callbacks = reply
        jobs, prompts, num_bytes, sub_jobs, sub_prompts, total, frames, done, failed, cancelled, expired, sent = [
            int(value or 0) for value in counters
        ]
        backlogs = tuple(map(_backlog, rows))
        models = dict.fromkeys(["", *self._directory.read().names, *(backlog.model for backlog in backlogs)])
        return QueueReading(
            open_jobs=jobs,
            open_prompts=prompts,
            open_bytes=num_bytes,
            open_units=num_units,
            overdue_s=overdue_ms / 1000,
            backlogs=backlogs,
            other_waiting_shards={text(model): num_shards for model, num_shards in others},
            num_waiting_tenants=num_tenants,
            messages=_messages(self._client, models),
            submitted_jobs=sub_jobs,
            submitted_prompts=sub_prompts,
            ended_jobs={"completed": done, "failed": failed, "cancelled": cancelled, "expired": expired},
            num_records=total,
            num_dead_units=num_dead,
            num_dead_frames=frames,
            waiting_callbacks=callbacks[0],
            dead_callbacks=callbacks[1],
            sent_callbacks=sent,
        )


def _may_be_lost(row: Sequence[RedisReply]) -> bool:
    if row[0] is None or text(row[0]) not in ("queued", "running"):
        return False
    num_lines, num_ok, num_failed, num_shards, num_done = (int(value) for value in row[1:])
    return num_ok + num_failed < num_lines and num_done >= num_shards


def _messages(client: redis.Redis, models: Iterable[str]) -> dict[str, dict[int, int]]:
    """By model, "" for none, and by the lane's step: how many messages wait."""
    # Not in the scripts: the broker's lists are in another hash slot.
    lanes = {
        (model, step): lane
        for model in models
        for step, lane in zip(steps_by_priority(), lanes_by_priority(queue_of(model)), strict=True)
    }
    lengths = ask(client, [("LLEN", lane) for lane in lanes.values()])
    found: dict[str, dict[int, int]] = {}
    for (model, step), length in zip(lanes, lengths, strict=True):
        found.setdefault(model, {})[step] = length
    return found


def _backlog(row: RedisReply) -> TenantBacklog:
    tenant, model, prompts, by_priority, num_unread = row
    # A shard whose job is gone has no priority any more; `choose` takes it out.
    waiting = {int(priority): (count, oldest_ms / 1000) for priority, count, oldest_ms in by_priority if priority}
    return TenantBacklog(text(tenant), text(model), int(prompts), waiting, num_unread)
