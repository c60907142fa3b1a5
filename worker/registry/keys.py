r"""Names the registry's keys, all of one hash slot, `millrace:{s0}:`, and the units of work they are about.

    j:<job>:job     HASH  v, st, n, ok, err, exp and can (of err: expired, cancelled), bytes, tenant, pri, spec,
                          created, started, deadline, cancel, fin, reason, errors, ns, sd (shards, shards done), tokp,
                          tokc, toko (prompt, cached, output tokens), tokr, tokt (of these resumed, thinking), retain,
                          idem, plan_tok (the token under which it was planned), lost_plan, strict, url, urls, model,
                          pin (the model it was submitted for), m:<model> (shards of that model that are not done),
                          trace, digest (of its lines, "": not known), resb (bytes of its records), cb (on_done),
                          e:<code> (records of prompts that failed so)
    j:<job>:in      HASH  index -> request line as it was given, until it has an answer
    j:<job>:in:<nonce>    HASH  likewise, of one submit, until it is accepted and this is renamed
    j:<job>:res     HASH  index -> record, JSON; written once (HSETNX)
    j:<job>:ord     LIST  indices in the order their records were written
    j:<job>:ckpt    HASH  index -> resume state, JSON, of prompts without a record
    j:<job>:s:plan  HASH  the job's plan, until it is planned     \ a unit: st, idx, n, done, own, tok, lease, fence
    j:<job>:s:<k>   HASH  shard k, until its prompts have records /  (claims so far), att, rp (re-published), since,
                          alone, guilty, term (ms of its lease), doubt, judged (of its holder, see reap.lua); a shard:
                          first, lane, head, turn, model (none: planned by version 2 or before)
    open            ZSET  <job>/<unit> -> next look, ms: when half of the lease is over, or announced + grace
    queued@<model>  ZSET  tenant -> when the first of its shards was queued, ms; queued@: likewise the models
    queued:<tenant>@<model>   ZSET  those shards by turn. Of shards without a model: queued, and queued:<tenant>
    adm:served      HASH  worker -> until when, ms, and what it serves, JSON
    adm:known       HASH  model -> likewise of one that was served within a week
    adm:r:<tenant>  HASH  bytes, of the records of ended jobs that are kept
    adm:e:<tenant>  ZSET  <job>/<bytes> -> until when they are
    adm, adm:t:<tenant>   HASH  prompts, bytes, jobs outstanding; a tenant's also result_bytes, of open jobs' records;
                          adm also has total (records), rate, rate_at, rate_total; since ever: sub_jobs, sub_prompts
                          (accepted), end_<state> (jobs), frames (no messages), cb_sent (callbacks)
    adm:u:<day>     HASH  <n, i, c or o>/<tenant>/<model> -> prompts, tokens in, cached and out, of a day (from 1970 on)
    idem:<digest>   STRING job id
    jobs            ZSET  job -> created, ms, the newest 10 000
    adm:j:<tenant>  ZSET  likewise of one tenant; adm:l:<tenant> STRING until when the last of its ended ones is kept
    dead            ZSET  <job>/<unit> that crashed too many workers ; deadraw LIST of frames that were no message
    w:<worker>      HASH  heartbeat
    adm:w:<worker>  STRING  what its engine is at, JSON, which goes with the heartbeat
    f:<file>:in     HASH  index -> line of an uploaded file; f:<file>:in:<nonce> while it comes
    files:<tenant>  HASH  file -> created, ms, expires, ms, bytes, and the rest as JSON, separated by blanks
    cb:e:<event>    HASH  a callback: job, to, tenant, state (the job's end), at, n, ok, err, tries, tok, error
    cb:url, cb:task ZSET  event -> when to send it next, or when its sender's lease ends, ms ; cb:dead: since when
    keys            HASH  SHA-256 of a key of `millrace serve` -> whose it is, JSON

A unit of work is a job's plan or one of its shards; both are claimed, renewed, released and written through a lease
with a fencing token `<fence>:<uuid>`. All times are Redis' own (TIME), in ms. A job is finished by the script that
writes its last record, and by nothing else: every accepted prompt ends in exactly one.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
import uuid
from dataclasses import dataclass
from typing import Self

from worker.registry.errors import InvalidJobId

PLAN = "plan"

_UNIT = re.compile(r"plan|[0-9]{1,9}")
_JOB_ID = re.compile(r"[a-z0-9]+-[0-9a-f-]{36}")
_FILE_ID = re.compile(r"file-[a-z0-9]+-[0-9a-f-]{36}")
_EVENT_ID = re.compile(r"evt_[a-z0-9]+-[0-9a-f-]{36}_[0-9]{1,16}")
_BEGINNING = re.compile(r"[0-9a-f-]{1,36}")


@dataclass(frozen=True, slots=True)
class UnitRef:
    """A job's plan, or one of its shards."""

    job_id: str
    unit: str  # "plan", or the shard's number in decimal

    @classmethod
    def plan(cls, job_id: str) -> Self:
        """The plan of a job."""
        return cls(job_id, PLAN)

    @classmethod
    def shard(cls, job_id: str, number: int) -> Self:
        """Shard `number`, from 0."""
        return cls(job_id, str(number))

    @classmethod
    def of_member(cls, member: str) -> Self:
        """The unit of a member of the open set."""
        job_id, _, unit = member.partition("/")
        return cls(job_id, unit)

    @property
    def is_plan(self) -> bool:
        """Whether it is a job's plan."""
        return self.unit == PLAN

    @property
    def kind(self) -> str:
        """`plan` or `shard`."""
        return "plan" if self.is_plan else "shard"

    @property
    def log_fields(self) -> dict[str, str | int]:
        """How logs and spans name it."""
        if self.is_plan:
            return {"job_id": self.job_id}
        return {"job_id": self.job_id, "shard": int(self.unit) if self.unit.isdecimal() else self.unit}

    def __str__(self) -> str:
        return f"{self.job_id}/{self.unit}"


class Keys:
    """Builds key names, from checked job ids only. All share one hash tag, so that a script may touch them together."""

    shard = "s0"  # in every key and every id

    def __init__(self) -> None:
        self.prefix = f"millrace:{{{self.shard}}}:"
        self.open = f"{self.prefix}open"  # units that are not finished, by when to look at them next
        self.counters = f"{self.prefix}adm"  # outstanding work and counts of all time
        self.queued = f"{self.prefix}queued"  # what the keys of shards that nobody holds begin with
        self.served = f"{self.counters}:served"  # what each worker serves
        self.known_models = f"{self.counters}:known"
        self.jobs = f"{self.prefix}jobs"  # by time of creation
        self.dead = f"{self.prefix}dead"  # units that crashed too many workers
        self.dead_frames = f"{self.prefix}deadraw"  # from the queue, that were no message
        self.workers = f"{self.prefix}w:"  # what a worker's heartbeat key begins with
        self.callbacks = f"{self.prefix}cb:"  # of jobs that have ended: what is to be told, and to whom
        self.engines = f"{self.counters}:w:"  # and that of its engine's figures
        self.api_keys = f"{self.prefix}keys"  # of `millrace serve`, by digest

    def jobs_of(self, tenant: str | None) -> str:
        """The jobs of a tenant by time of creation; None: of all."""
        return self.jobs if tenant is None else f"{self.counters}:j:{tenant}"

    def tenant_counters(self, tenant: str) -> str:
        """Outstanding work of one tenant."""
        return f"{self.counters}:t:{tenant}"

    def usage(self, day: int) -> str:
        """What was used on a day, counted from 1970 on."""
        return f"{self.counters}:u:{day}"

    def idempotency(self, tenant: str, key: str) -> str:
        """Where the job of a producer's own key is remembered. The key may be any text, so it is hashed."""
        digest = hashlib.sha256(f"{tenant}\0{key}".encode("utf-8", "surrogatepass")).hexdigest()
        return f"{self.prefix}idem:{digest}"

    def job(self, job_id: str) -> str:
        """The job's hash."""
        return self._of_job(job_id, "job")

    def lines(self, job_id: str) -> str:
        """The job's request lines."""
        return self._of_job(job_id, "in")

    def staged(self, job_id: str, nonce: str) -> str:
        """The lines of one submit of the job; without a nonce where an accepted job has them."""
        return self._of_job(job_id, f"in:{nonce}") if nonce else self.lines(job_id)

    def records(self, job_id: str) -> str:
        """The job's records."""
        return self._of_job(job_id, "res")

    def order(self, job_id: str) -> str:
        """The order of the job's records."""
        return self._of_job(job_id, "ord")

    def resume_states(self, job_id: str) -> str:
        """How far the job's unfinished prompts have come."""
        return self._of_job(job_id, "ckpt")

    def files(self, tenant: str) -> str:
        """The tenant's uploaded files."""
        return f"{self.prefix}files:{tenant}"

    def callback(self, event_id: str) -> str:
        """A callback's hash. Raises ValueError for what is no event's id."""
        if _EVENT_ID.fullmatch(event_id) is None:
            raise ValueError(f"{event_id[:80]!r} is no id of a callback")
        return f"{self.callbacks}e:{event_id}"

    def file_lines(self, file_id: str, nonce: str = "") -> str:
        """The lines of an uploaded file, or of an upload that goes on. Raises ValueError for what is no file's id."""
        if not self.is_file_id(file_id):
            raise ValueError(f"{file_id[:80]!r} is no id of a file")
        return f"{self.prefix}f:{file_id}:in{nonce and ':'}{nonce}"

    def is_file_id(self, name: str) -> bool:
        """Whether `name` is an uploaded file's id of this registry."""
        return _FILE_ID.fullmatch(name) is not None and name.startswith(f"file-{self.shard}-")

    def new_file_id(self, tenant: str, idempotency_key: str | None) -> str:
        """A fresh id; with a key always the same one of this tenant."""
        if idempotency_key is None:
            return f"file-{self.new_job_id()}"
        digest = hashlib.sha256(f"file\0{tenant}\0{idempotency_key}".encode("utf-8", "surrogatepass")).digest()
        return f"file-{self.shard}-{uuid.UUID(bytes=digest[:16])}"

    def unit(self, ref: UnitRef) -> str:
        """The hash of a plan or shard. Raises InvalidJobId, also for a unit that is none."""
        if _UNIT.fullmatch(ref.unit) is None:
            raise InvalidJobId(f"unit of job {ref.job_id[:80]} is {ref.unit[:80]!r}; accepted: plan or a number")
        return self._of_job(ref.job_id, f"s:{ref.unit}")

    def of_unit_scripts(self, ref: UnitRef) -> dict[str, str]:
        """The keys of a unit, its job and the queue, by the names that scripts are declared with (see Script)."""
        job_id = ref.job_id
        of_job = {"job": self.job(job_id), "records": self.records(job_id), "order": self.order(job_id)}
        of_job |= {"lines": self.lines(job_id), "resume_states": self.resume_states(job_id)}
        of_job["staged"] = of_job["lines"]  # as plain Celery producers do it
        return of_job | {"unit": self.unit(ref), "plan": self.unit(UnitRef.plan(job_id))} | self.of_queue_scripts()

    def of_queue_scripts(self) -> dict[str, str]:
        """The keys that belong to no single job, by the same names."""
        return {
            "open": self.open,
            "counters": self.counters,
            "dead": self.dead,
            "queued": self.queued,
            "jobs": self.jobs,
            "served": self.served,
            "known_models": self.known_models,
        }

    def new_job_id(self) -> str:
        """A fresh id: the shard, then a version 7 UUID, so that ids sort by time."""
        value = (time.time_ns() // 1_000_000 & (1 << 48) - 1) << 80 | secrets.randbits(80)
        value = value & ~(0xF << 76) | 0x7 << 76  # version
        value = value & ~(0x3 << 62) | 0x2 << 62  # variant
        return f"{self.shard}-{uuid.UUID(int=value)}"

    def check_job_id(self, job_id: object) -> str:
        """`job_id`, if it is one of this registry. Raises InvalidJobId."""
        if not isinstance(job_id, str) or _JOB_ID.fullmatch(job_id) is None:
            raise InvalidJobId(f"job id is {str(job_id)[:80]!r}; accepted: {self.shard}-<36 characters of a UUID>")
        if not job_id.startswith(f"{self.shard}-"):
            raise InvalidJobId(f"job {job_id} is of another registry; accepted: {self.shard}-...")
        return job_id

    def is_job_id(self, name: str) -> bool:
        """Whether `name` is a whole id, of this registry or another."""
        return _JOB_ID.fullmatch(name) is not None

    def job_beginning(self, name: str) -> str:
        """What ids of this registry begin with if `name` is a part of one; the shard may be left out of it.

        Raises InvalidJobId for what no id begins with.
        """
        beginning = name.removeprefix(f"{self.shard}-")
        if _BEGINNING.fullmatch(beginning) is None:
            raise InvalidJobId(f"job is {name[:80]!r}; accepted: a job's id, the beginning of one, or latest")
        return f"{self.shard}-{beginning}"

    def _of_job(self, job_id: str, part: str) -> str:
        return f"{self.prefix}j:{self.check_job_id(job_id)}:{part}"
