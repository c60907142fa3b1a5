"""Tells how many prompts wait for which model and for how long, also while no worker is up: for whoever starts workers.

It reads every open unit and its job, some 15,000 of a full Redis in 0.2 s, so it is for a look now and then and not for
a worker's metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from worker.registry.exchange import Exchange, RedisReply, text
from worker.registry.keys import Keys, UnitRef
from worker.registry.models import ServedModels

MAX_UNITS = 20_000  # read; a million prompts in shards of 256 and 10,000 plans are fewer
CHUNK_UNITS = 1000  # in one round trip
BYTES_A_TOKEN = 4  # of a request line, until an answer has told more: English has 4 to 5, and a line is not all prompt


@dataclass(frozen=True, slots=True)
class ModelBacklog:
    """Open prompts of one model."""

    model: str  # "": of jobs that nobody has planned and that name none
    open_prompts: int  # without a record
    waiting_prompts: int  # of these, in shards or jobs that no worker has
    open_tokens: int  # of the open prompts, in and out; an estimate, see _tokens_a_prompt
    waiting_tokens: int
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
    open_tokens: float = 0.0
    waiting_tokens: float = 0.0
    first_ms: list[int] = field(default_factory=list)

    def add(self, num_prompts: int, num_tokens: float, first_ms: int, *, is_waiting: bool) -> None:
        """Count the open prompts of a unit."""
        self.open_prompts += num_prompts
        self.open_tokens += num_tokens
        if is_waiting and num_prompts:
            self.waiting_prompts += num_prompts
            self.waiting_tokens += num_tokens
            self.first_ms.append(first_ms)

    def of_model(self, model: str, now_ms: int) -> ModelBacklog:
        """What was counted."""
        return ModelBacklog(
            model,
            self.open_prompts,
            self.waiting_prompts,
            round(self.open_tokens),
            round(self.waiting_tokens),
            max(now_ms - min(self.first_ms), 0) / 1000 if self.first_ms else 0.0,
        )


def backlog(keys: Keys) -> Exchange[Backlog]:
    """The backlog at this moment, in a round trip for every 1,000 units."""
    answers = yield [*ServedModels.questions(keys), ("ZRANGE", keys.open, 0, MAX_UNITS)]
    served, (seconds, micros), members = ServedModels.of_answers(answers[:-1]), answers[-2], answers[-1]
    now_ms = int(seconds) * 1000 + int(micros) // 1000
    sums: dict[str, _Sums] = {model: _Sums() for model in ("", *served.lately_served)}
    refs = [UnitRef.of_member(text(member)) for member in members[:MAX_UNITS]]
    jobs: dict[str, RedisReply] = {}
    for start in range(0, len(refs), CHUNK_UNITS):
        chunk = refs[start : start + CHUNK_UNITS]
        rows = yield [("HMGET", keys.unit(ref), "st", "n", "done", "model", "first") for ref in chunk]
        new = list({ref.job_id: None for ref in chunk if ref.job_id not in jobs})
        # Behind the units: a job that is gone by then has none that is open.
        found = (yield [("HMGET", keys.job(job_id), *_OF_JOB) for job_id in new]) if new else []
        jobs |= zip(new, found, strict=True)
        for ref, row in zip(chunk, rows, strict=True):
            _count(sums, row, jobs[ref.job_id], served, is_plan=ref.is_plan)
    models = [of_model.of_model(model, now_ms) for model, of_model in sorted(sums.items())]
    return Backlog(models, num_unread_units=len(members) - len(refs))


_OF_JOB = ("pin", "created", "n", "bytes", "ok", "err", "tokp", "toko")


def _count(sums: dict[str, _Sums], row: RedisReply, job: RedisReply, served: ServedModels, *, is_plan: bool) -> None:
    """Add a unit, unless it or its job has ended since the list of units was read."""
    state, num_prompts, num_done, model, first_ms = row
    pin, created_ms, *_ = job
    if state is None or created_ms is None:
        return
    name = text(model or b"")
    if is_plan:  # of all the job's prompts
        pinned = text(pin or b"")
        name, first_ms = served.resolve(pinned) or pinned, created_ms
    num_open = max(int(num_prompts) - int(num_done), 0)
    num_tokens = num_open * _tokens_a_prompt(job)
    sums.setdefault(name, _Sums()).add(num_open, num_tokens, int(first_ms or 0), is_waiting=text(state) == "queued")


def _tokens_a_prompt(job: RedisReply) -> float:
    """Mean tokens of the job's prompts with a record, in and out; before the first by the bytes of its lines.

    Nobody knows more before a prompt is tokenised, which only workers of its model can.
    """
    num_lines, num_bytes, num_good, num_failed, tokens_in, tokens_out = (int(value or 0) for value in job[2:])
    if num_good > 0:  # a prompt may fail in the engine, which counts its tokens, or before
        return (tokens_in + tokens_out) / (num_good + num_failed)
    return num_bytes / BYTES_A_TOKEN / max(num_lines, 1)


def totals(keys: Keys) -> Exchange[Mapping[str, int]]:
    """Open jobs, and their prompts without a record."""
    [(jobs, prompts)] = yield [("HMGET", keys.counters, "jobs", "prompts")]
    return {"open_jobs": int(jobs or 0), "open_prompts": int(prompts or 0)}
