"""Claims, renews and releases leases on units, and writes records and resume states under them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import redis

from settings import WorkerSettings
from worker.registry.exchange import Command, RedisReply, ask, ask_one, raw_values, text
from worker.registry.keys import Keys, UnitRef
from worker.registry.lifecycle import ClaimRefusal, Outcome, PutStatus, RunMode
from worker.registry.lua import Argument, Script, Scripts
from worker.schemas import BatchError


@dataclass(frozen=True, slots=True)
class Claim:
    """A lease on a unit, with what its holder needs to know."""

    ref: UnitRef
    token: str  # fencing token `<n>:<uuid>`: a write with an older one is refused
    mode: RunMode
    time_left_s: float | None  # until the job's deadline; None: it has none
    attempts: int  # workers that died over it before
    priority: int  # 0 first .. 9 last
    tenant: str
    created_s: int  # Unix time of the job's submission
    num_lines: int  # of the job
    missing: tuple[int, ...]  # indices without a record, in the order to run them
    head: str = ""  # what a shard's first prompt begins with, as it sorts among shards
    is_strict: bool = False  # one bad line fails the job
    endpoint: str | None = None  # the one all lines must name; None: each its own
    model: str = ""  # the one that may run the shard, resolved from what its lines name; "": any
    job_model: str | None = None  # the one that the job was submitted for, as its producer wrote it
    num_done: int = 0  # of its prompts, those that had a record
    acknowledged: set[int] = field(default_factory=set, compare=False)  # indices whose records Redis has taken since
    traceparent: str = ""  # W3C trace context of the job or, once it is held, of what is done under it; "": none

    @property
    def num_known(self) -> int:
        """How many records of the unit Redis must have; fewer means that it has lost some."""
        return self.num_done + len(self.acknowledged)


@dataclass(frozen=True, slots=True)
class NewShard:
    """A shard that a planner cut."""

    indices: Sequence[int]  # of its lines, in the order to run them
    head: str = ""  # see Claim.head; without it the order of shards says nothing about prefixes
    model: str = ""  # the one that runs it; "": any


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """A prompt's record with what the job's counters need of it."""

    index: int
    outcome: Outcome
    record: str  # JSON, ASCII
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    resumed_tokens: int = 0  # of output_tokens: taken over from a resume state, not generated again
    reasoning_tokens: int = 0  # of output_tokens: thinking before the answer

    @property
    def num_bytes(self) -> int:
        """Its size in Redis."""
        return len(self.record)

    @property
    def row(self) -> tuple[int | str, ...]:
        """What the script PUT takes of it."""
        head = (self.index, self.outcome.value, self.record, self.prompt_tokens, self.cached_tokens)
        return (*head, self.output_tokens, self.resumed_tokens, self.reasoning_tokens)


@dataclass(frozen=True, slots=True)
class PromptResumeState:
    """How far an unfinished prompt has come; it replaces an earlier one, and the prompt's record replaces it."""

    index: int
    state: str  # JSON, ASCII

    @property
    def num_bytes(self) -> int:
        """Its size in Redis."""
        return len(self.state)


class UnitLeases:
    """Claims, renews, writes and gives back units. Methods raise redis.RedisError when Redis cannot be had."""

    def __init__(
        self, client: redis.Redis, keys: Keys, *, owner: str, settings: WorkerSettings, models: Sequence[str] = ()
    ) -> None:
        """`models`: the names of the one that is served here; of others, units can be claimed only to be closed."""
        self._client = client
        self._keys = keys
        self._owner = owner
        self.lease_s = settings.lease_s
        self._lease_ms = round(settings.lease_s * 1000)
        self._max_attempts = settings.max_attempts
        self._grace_ms = round(settings.reap_grace_s * 1000)
        self._models = json.dumps(models)

    def claim(self, ref: UnitRef, *, alone: bool = False) -> Claim | ClaimRefusal:
        """Take a unit for one lease, if it is not finished and nobody has it.

        `alone`: nothing else will run in this process meanwhile; `begin_alone` notes that when it begins. Without it, a
        unit that crashed a worker before is refused, unless there is nothing to run in it.
        """
        call = Scripts.CLAIM(
            self._keys.of_unit_scripts(ref),
            job_id=ref.job_id,
            unit=ref.unit,
            worker=self._owner,
            nonce=uuid.uuid4().hex,
            lease_ms=self._lease_ms,
            max_attempts=self._max_attempts,
            alone=int(alone),
            models=self._models,
        )
        reply = ask_one(self._client, call)
        status = text(reply[0])
        return _claim(ref, reply) if status == "ok" else ClaimRefusal(status)

    def is_suspect(self, ref: UnitRef) -> bool:
        """Whether a unit that nobody holds crashed a worker before."""
        return bool(ask_one(self._client, Scripts.SUSPECT(self._keys.of_unit_scripts(ref))))

    def begin_alone(self, claim: Claim) -> bool:
        """Note that only this unit runs in this process: if it crashes, the unit is to blame. False if not ours."""
        return bool(self._run(Scripts.BEGIN_ALONE, claim))

    def put(self, claim: Claim, records: Sequence[PromptRecord], *, at_end: bool = False) -> tuple[PutStatus, RunMode]:
        """Write records, each index once; returns where the unit stands and what to do with the rest of it.

        `at_end`: of a job that is to end, also where Redis has no memory left: no more come after them, and an ended
        job can be deleted.
        """
        rows = [item.row for item in records]
        script = Scripts.PUT_AT_END if at_end else Scripts.PUT
        status, mode = self._run(script, claim, rows, num_known=claim.num_known)
        if text(status) == PutStatus.OPEN:
            claim.acknowledged.update(item.index for item in records)
        return PutStatus(text(status)), _mode(mode)

    def put_resume_states(self, claim: Claim, states: Sequence[PromptResumeState]) -> bool:
        """Keep how far prompts without a record have come. False if the unit is not ours."""
        return bool(self._run(Scripts.PUT_RESUME_STATES, claim, [(item.index, item.state) for item in states]))

    def renew(self, claims: Sequence[Claim]) -> list[tuple[PutStatus, RunMode, float | None]]:
        """Keep units for another lease: for each, where it stands, its mode, seconds to its deadline."""
        calls = [
            self._call(Scripts.RENEW, claim, lease_ms=self._lease_ms, num_known=claim.num_known) for claim in claims
        ]
        return [
            (PutStatus(text(status)), _mode(mode), _time_left_s(time_left_ms))
            for status, mode, time_left_ms in ask(self._client, calls)
        ]

    def cancelled(self, job_ids: Collection[str]) -> set[str]:
        """Which of these jobs were cancelled: cheap enough to ask twice a second."""
        flags = ask(self._client, [("HGET", self._keys.job(job_id), "cancel") for job_id in job_ids])
        return {job_id for job_id, flag in zip(job_ids, flags, strict=True) if flag not in (None, b"0")}

    def release(self, claim: Claim, *, count_attempt: bool) -> bool:
        """Give a unit back unfinished. False if it was not ours any more."""
        return bool(self._run(Scripts.RELEASE, claim, grace_ms=self._grace_ms, count_attempt=int(count_attempt)))

    def planned(
        self,
        claim: Claim,
        shards: Sequence[NewShard],
        *,
        ageing_s: float,
        endpoints: Sequence[str] = (),
        model: str | None = None,
    ) -> PutStatus:
        """Replace a job's plan by its shards: then it is done. Else it was not ours any more, or has gone back.

        `endpoints` and `model`: those of the lines, for the job's status; None: they are of several models.
        """
        answer = self._run(
            Scripts.PLANNED,
            claim,
            [(",".join(map(str, shard.indices)), shard.head, shard.model) for shard in shards],
            grace_ms=self._grace_ms,
            ageing_ms=round(ageing_s * 1000),
            endpoints=",".join(endpoints),
            model=model or "",
            traceparent=claim.traceparent,
        )
        return {1: PutStatus.UNIT_DONE, 0: PutStatus.FENCED}.get(answer, PutStatus.REWOUND)

    def fail(self, claim: Claim, reason: str, errors: Sequence[BatchError]) -> tuple[PutStatus, RunMode]:
        """End the job of this plan without running any line; answers as `put` does.

        A job that is cancelled or past its deadline is not failed: it stays open, to be closed as its mode says.
        """
        entries = json.dumps([error.model_dump() for error in errors])
        status, mode = self._run(Scripts.FAIL, claim, reason=reason, errors=entries)
        return PutStatus(text(status)), _mode(mode)

    def can_be_had(self) -> bool:
        """Whether Redis answers at this moment."""
        try:
            return bool(self._client.ping())
        except redis.RedisError:
            return False

    def lines(self, job_id: str, indices: Sequence[int], *, under: Claim | None = None) -> list[bytes | None]:
        """Request lines by index; None for one that is not there, see `lines_and_resume_states`."""
        [lines] = self._read([self._keys.lines(job_id)], indices, under)
        return lines

    def lines_and_resume_states(
        self, job_id: str, indices: Sequence[int], *, under: Claim | None = None
    ) -> list[tuple[bytes | None, bytes | None]]:
        """Request lines by index, each with its prompt's resume state; None for one that is not there.

        `under`: the lease that they are read for. Raises redis.ConnectionError where a line is not there and neither is
        this lease: the answer may be that of an old primary, whose lines are gone with records that only it has.
        """
        lines, states = self._read([self._keys.lines(job_id), self._keys.resume_states(job_id)], indices, under)
        return list(zip(lines, states, strict=True))

    def _read(self, keys: Sequence[str], indices: Sequence[int], under: Claim | None) -> list[list[bytes | None]]:
        fields = [str(index) for index in indices]
        commands: list[Command] = [("HMGET", key, *fields) for key in keys]
        if under is not None:
            commands.append(("HGET", self._keys.unit(under.ref), "tok"))
        found = ask(self._client, commands)
        if under is not None:
            token = found.pop()
            if None in found[0] and (token is None or text(token) != under.token):
                raise redis.ConnectionError("lines are missing, and so is the lease: is this an old primary?")
        return [raw_values(values) for values in found]

    def _run(
        self, script: Script, claim: Claim, rows: Iterable[Sequence[Argument]] = (), **arguments: Argument
    ) -> RedisReply:
        return ask_one(self._client, self._call(script, claim, rows, **arguments))

    def _call(
        self, script: Script, claim: Claim, rows: Iterable[Sequence[Argument]] = (), **arguments: Argument
    ) -> Command:
        lease = {"job_id": claim.ref.job_id, "unit": claim.ref.unit, "token": claim.token}
        arguments |= {name: value for name, value in lease.items() if name in script.arguments}
        return script(self._keys.of_unit_scripts(claim.ref), rows, **arguments)


def _mode(word: bytes | str) -> RunMode:
    return RunMode(text(word) or RunMode.RUN)


def _claim(ref: UnitRef, reply: RedisReply) -> Claim:
    _, token, mode, time_left_ms, attempts, num_lines, priority, tenant, created_ms, indices, done, *more = reply
    head, is_strict, endpoint, traceparent, model, job_model = more
    wanted = range(num_lines) if ref.is_plan else [int(index) for index in text(indices).split(",")]
    recorded = {int(index) for index in done}
    return Claim(
        ref=ref,
        token=text(token),
        mode=RunMode(text(mode)),
        time_left_s=_time_left_s(time_left_ms),
        attempts=attempts,
        priority=priority,
        tenant=text(tenant),
        created_s=created_ms // 1000,
        num_lines=num_lines,
        num_done=len(recorded & set(wanted)),
        missing=tuple(index for index in wanted if index not in recorded),
        head=text(head),
        is_strict=bool(is_strict),
        endpoint=text(endpoint) or None,
        model=text(model),
        job_model=text(job_model) or None,
        traceparent=text(traceparent),
    )


def _time_left_s(milliseconds: int) -> float | None:
    return None if milliseconds < 0 else milliseconds / 1000
