"""Names of the registry's keys."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
import uuid
from dataclasses import dataclass

from worker.registry.errors import InvalidJobId
from worker.registry.unit_ref import UnitRef

_UNIT = re.compile(r"plan|[0-9]{1,9}")
_JOB_ID = re.compile(r"[a-z0-9]+-[0-9a-f-]{36}")


@dataclass(frozen=True, slots=True)
class Keys:
    """Builds key names, from checked job ids only. All share one hash tag, so that a script may touch them together."""

    shard: str = "s0"

    @property
    def prefix(self) -> str:
        """What every key begins with."""
        return f"millrace:{{{self.shard}}}:"

    @property
    def open(self) -> str:
        """Units that are not finished, by when to look at them next."""
        return f"{self.prefix}open"

    @property
    def admission(self) -> str:
        """Outstanding work; a tenant's is at `adm:t:<tenant>`."""
        return f"{self.prefix}adm"

    def tenant_admission(self, tenant: str) -> str:
        """Outstanding work of one tenant."""
        return f"{self.admission}:t:{tenant}"

    @property
    def queued(self) -> str:
        """Tenants with shards that nobody holds; a tenant's shards are at `queued:<tenant>`."""
        return f"{self.prefix}queued"

    @property
    def jobs(self) -> str:
        """Jobs by time of creation."""
        return f"{self.prefix}jobs"

    @property
    def dead(self) -> str:
        """Units that crashed too many workers."""
        return f"{self.prefix}dead"

    @property
    def dead_frames(self) -> str:
        """Frames from the queue that were no message."""
        return f"{self.prefix}deadraw"

    @property
    def workers(self) -> str:
        """What a worker's heartbeat key begins with."""
        return f"{self.prefix}w:"

    def idempotency(self, tenant: str, key: str) -> str:
        """Where the job submitted under a producer's own key is remembered. The key may hold anything: hashed."""
        digest = hashlib.sha256(f"{tenant}\0{key}".encode("utf-8", "surrogatepass")).hexdigest()
        return f"{self.prefix}idem:{digest}"

    def job(self, job_id: str) -> str:
        """The job's hash."""
        return self._of_job(job_id, "job")

    def lines(self, job_id: str) -> str:
        """The job's request lines."""
        return self._of_job(job_id, "in")

    def records(self, job_id: str) -> str:
        """The job's records."""
        return self._of_job(job_id, "res")

    def order(self, job_id: str) -> str:
        """The order of the job's records."""
        return self._of_job(job_id, "ord")

    def checkpoints(self, job_id: str) -> str:
        """How far the job's unfinished prompts have come."""
        return self._of_job(job_id, "ckpt")

    def unit(self, ref: UnitRef) -> str:
        """The hash of a plan or shard. Raises InvalidJobId also for what is no unit."""
        if _UNIT.fullmatch(ref.unit) is None:
            raise InvalidJobId(f"unit of job {ref.job_id[:80]} is {ref.unit[:80]!r}; accepted: plan or a number")
        return self._of_job(ref.job_id, f"s:{ref.unit}")

    def of_unit_scripts(self, ref: UnitRef) -> list[str]:
        """KEYS of every script about a unit, in the order of scripts/prelude.lua."""
        return [
            self.job(ref.job_id),
            self.records(ref.job_id),
            self.order(ref.job_id),
            self.lines(ref.job_id),
            self.unit(ref),
            self.unit(UnitRef.plan(ref.job_id)),
            self.open,
            self.admission,
            self.dead,
            self.checkpoints(ref.job_id),
            self.queued,
        ]

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

    def _of_job(self, job_id: str, part: str) -> str:
        return f"{self.prefix}j:{self.check_job_id(job_id)}:{part}"
