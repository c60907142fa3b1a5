"""Tells how many prompts wait for which model and for how long, also while no worker is up: for whoever starts workers.

It reads every open unit, some 15,000 of a full Redis in 0.2 s, so it is for a look now and then and not for a worker's
metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from worker.registry.exchange import Exchange, RedisReply, text
from worker.registry.keys import Keys, UnitRef
from worker.registry.models import ServedModels

MAX_UNITS = 20_000  # read; a million prompts in shards of 256 and 10,000 plans are fewer
CHUNK_UNITS = 1000  # in one round trip


@dataclass(frozen=True, slots=True)
class ModelBacklog:
    """Open prompts of one model."""

    model: str  # "": of jobs that nobody has planned and that name none
    open_prompts: int  # without a record
    waiting_prompts: int  # of these, in shards or jobs that no worker has
    oldest_wait_s: float  # since the oldest of those that wait was submitted, or its shard first queued; 0: none waits


@dataclass(frozen=True, slots=True)
class Backlog:
    """What is to be done, by model."""

    models: Sequence[ModelBacklog]  # by name: with open prompts, served within a week, and ""
    num_unread_units: int = 0  # 1 or more: there are more than were read


@dataclass(slots=True)
class _Sums:
    open_prompts: int = 0
    waiting_prompts: int = 0
    first_ms: list[int] = field(default_factory=list)

    def add(self, num_prompts: int, first_ms: int, *, is_waiting: bool) -> None:
        """Count the open prompts of a unit."""
        self.open_prompts += num_prompts
        if is_waiting and num_prompts:
            self.waiting_prompts += num_prompts
            self.first_ms.append(first_ms)


def backlog(keys: Keys) -> Exchange[Backlog]:
    """The backlog at this moment, in a round trip for every 1,000 units."""
    answers = yield [*ServedModels.questions(keys), ("ZRANGE", keys.open, 0, MAX_UNITS)]
    served, (seconds, micros), members = ServedModels.of_answers(answers[:-1]), answers[-2], answers[-1]
    now_ms = int(seconds) * 1000 + int(micros) // 1000
    sums: dict[str, _Sums] = {model: _Sums() for model in ("", *served.lately_served)}
    refs = [UnitRef.of_member(text(member)) for member in members[:MAX_UNITS]]
    for start in range(0, len(refs), CHUNK_UNITS):
        chunk = refs[start : start + CHUNK_UNITS]
        rows = yield [_question(keys, ref) for ref in chunk]
        plans = yield [("HMGET", keys.job(ref.job_id), "pin", "created") for ref in chunk if ref.is_plan] or [("TIME",)]
        of_plans = iter(plans)
        for ref, row in zip(chunk, rows, strict=True):
            job = next(of_plans) if ref.is_plan else None
            _count(sums, row, job, served)
    return Backlog(
        [
            ModelBacklog(
                model,
                of_model.open_prompts,
                of_model.waiting_prompts,
                max(now_ms - min(of_model.first_ms), 0) / 1000 if of_model.first_ms else 0.0,
            )
            for model, of_model in sorted(sums.items())
        ],
        num_unread_units=len(members) - len(refs),
    )


def _question(keys: Keys, ref: UnitRef) -> Sequence[str]:
    return "HMGET", keys.unit(ref), "st", "n", "done", "model", "first"


def _count(sums: dict[str, _Sums], row: RedisReply, job: RedisReply, served: ServedModels) -> None:
    """Add a unit, unless it has ended since the list of units was read."""
    state, num_prompts, num_done, model, first_ms = row
    if state is None:
        return
    name = text(model or b"")
    if job is not None:  # a plan, of all the job's prompts
        pin, first_ms = job
        if first_ms is None:
            return
        pinned = text(pin or b"")
        name = served.resolve(pinned) or pinned
    num_open = max(int(num_prompts) - int(num_done), 0)
    sums.setdefault(name, _Sums()).add(num_open, int(first_ms or 0), is_waiting=text(state) == "queued")


def totals(keys: Keys) -> Exchange[Mapping[str, int]]:
    """Open jobs, and their prompts without a record."""
    [(jobs, prompts)] = yield [("HMGET", keys.counters, "jobs", "prompts")]
    return {"open_jobs": int(jobs or 0), "open_prompts": int(prompts or 0)}
