"""Works on jobs in a test's Redis: through the registry's classes, a worker's inner parts without Celery, or as a
program written for OpenAI's batches sees them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, cast

import redis
from celery import Celery
from openai.types import Batch, BatchError, Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion
from openai.types.shared import ErrorObject
from pydantic import BaseModel, SecretStr

from settings import LimitSettings, ModelSettings, RedisSettings, Settings, WorkerSettings
from tests.support.fake_engine import FakeEngine
from tests.support.processes import running_thread
from tests.support.request_lines import batch_line
from worker.broker.messages import Announcer
from worker.lines.errors import LineError
from worker.records.failure import Failure, error_record, line_error_record
from worker.records.record import BatchFile, RecordContext, encode_record
from worker.registry.connect import connect
from worker.registry.exchange import perform, text
from worker.registry.intake import READ_LINES, JobIntake
from worker.registry.jobs import JobControl, JobQueries, ResultOrder
from worker.registry.keys import Keys, UnitRef
from worker.registry.leases import Claim, NewShard, PromptRecord, UnitLeases
from worker.registry.lifecycle import ClaimRefusal, Outcome, PutStatus
from worker.registry.lua import script_source
from worker.registry.models import Announcement, ModelDirectory
from worker.registry.queues import ReapQueue, ShardQueue
from worker.requests.served_model import ServedModel
from worker.runtime.engine_thread import EngineThread
from worker.runtime.held_units import HeldUnit, HeldUnits
from worker.runtime.planner import Planner
from worker.runtime.quarantine import Quarantine
from worker.runtime.shard import ShardParts, ShardPrompts, ShardRun, Turn
from worker.runtime.unit_runner import ShardSlots, UnitRunner
from worker.runtime.window import AdmissionWindow
from worker.runtime.writer import ResultWriter, refused_record
from worker.schemas import JobState, JobStatus, SubmitOptions, WorkerInfo, batch_object
from worker.unit_closer import UnitCloser

BODIES: dict[str, type[BaseModel]] = {
    "chat.completion": ChatCompletion,
    "text_completion": Completion,
    "list": CreateEmbeddingResponse,
}

# Those of ended_job: with a custom_id and without, no JSON, one whose custom_id is taken.
NAMED = batch_line("/v1/completions", {"prompt": "b"}, custom_id="b")
LINES = (b'{"prompt": "a"}', NAMED, b"{bad", b'  {"prompt": "c", "n": 0}', b'{"prompt": "d", "custom_id": "b"}', b"{}")


@dataclass(frozen=True)
class TestRegistry:
    """A registry with short times. `redis` is the bare client."""

    __test__ = False

    redis: redis.Redis
    keys: Keys
    settings: RedisSettings

    @classmethod
    def at(cls, url: str) -> TestRegistry:
        settings = RedisSettings(url=SecretStr(url))
        return cls(connect(settings), Keys(), settings)

    @property
    def control(self) -> JobControl:
        return JobControl(self.redis, self.keys)

    def intake(self, *, limits: LimitSettings | None = None) -> JobIntake:
        settings = Settings(redis=self.settings, limits=limits or LimitSettings())
        return JobIntake(self.redis, self.keys, settings)

    def leases(
        self, *, lease_s: float = 30.0, max_attempts: int = 3, owner: str = "tester", models: Sequence[str] = ("fake",)
    ) -> UnitLeases:
        settings = WorkerSettings().model_copy(update={"lease_s": lease_s, "max_attempts": max_attempts})
        return UnitLeases(self.redis, self.keys, owner=owner, settings=settings, models=models)

    def directory(self, worker_id: str = "tester", *, known: Sequence[str] = ()) -> ModelDirectory:
        return ModelDirectory(self.redis, self.keys, worker_id=worker_id, known=known)

    def serve(self, name: str, worker_id: str = "", *, aliases: Sequence[str] = (), fingerprint: str = "") -> None:
        """Announce a model of a worker for half a minute."""
        endpoints = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
        announcement = Announcement(name=name, aliases=tuple(aliases), endpoints=endpoints, fingerprint=fingerprint)
        self.directory(worker_id or f"worker-of-{name}").announce(announcement)

    def reap_queue(self, *, grace_s: float = 30.0, ageing_s: float = 60.0, patience_s: float = 10.0) -> ReapQueue:
        return ReapQueue(self.directory(), self.keys, grace_s=grace_s, ageing_s=ageing_s, patience_s=patience_s)

    def shard_queue(self, *, ageing_s: float = 60.0, models: Sequence[str] = ("fake",)) -> ShardQueue:
        return ShardQueue(self.redis, self.keys, ageing_s=ageing_s, models=models)

    def submit(
        self, lines: Sequence[bytes], options: SubmitOptions | None = None, limits: LimitSettings | None = None
    ) -> str:
        """A queued job with these lines."""
        job_id = self.keys.new_job_id()
        intake = self.intake(limits=limits)
        for first in range(0, len(lines), READ_LINES):
            intake.stage(job_id, first, lines[first : first + READ_LINES])
        intake.submit(job_id, len(lines), options or SubmitOptions())
        return job_id

    def running_job(self, *shards: Sequence[int], options: SubmitOptions | None = None, model: str = "fake") -> str:
        """A planned job with one line for each index of `shards`, of this model, which is served."""
        self.serve(model)
        job_id = self.submit([b'{"prompt": "a"}'] * sum(map(len, shards)), options)
        leases = self.leases()
        cut = [NewShard(shard, model=model) for shard in shards]
        assert leases.planned(must_claim(leases, UnitRef.plan(job_id)), cut, ageing_s=60.0) is PutStatus.UNIT_DONE
        return job_id

    def status(self, job_id: str) -> JobStatus:
        return perform(self.redis, JobQueries(self.keys).status(job_id))

    def jobs(self, limit: int = 100) -> list[JobStatus]:
        return perform(self.redis, JobQueries(self.keys).jobs(limit))

    def workers(self) -> list[WorkerInfo]:
        return perform(self.redis, JobQueries(self.keys).workers())

    def records(self, job_id: str) -> Sequence[bytes]:
        """The first page of a job's records, as they were written."""
        return perform(self.redis, JobQueries(self.keys).page(job_id, 0, ResultOrder.COMPLETION)).records

    def let_pass(self, ref: UnitRef, seconds: float) -> None:
        """Bring the end of the unit's lease nearer by so many seconds."""
        self.redis.hincrby(self.keys.unit(ref), "lease", -round(1000 * seconds))

    def lapse(self, ref: UnitRef) -> None:
        """Let the unit's lease run out now, by the death of its holder."""
        self.redis.hset(self.keys.unit(ref), mapping={"lease": 1, "judged": "1 gone"})

    def lease_left_s(self, ref: UnitRef) -> float:
        """How long the unit's lease still lasts, by Redis's clock."""
        return float(cast(bytes, self.redis.hget(self.keys.unit(ref), "lease"))) / 1000 - self.time_s()

    def expire(self, job_id: str) -> None:
        """Let the job's deadline pass now."""
        self.redis.hset(self.keys.job(job_id), "deadline", 1)

    def time_s(self) -> float:
        """Redis's clock, which leases and deadlines go by."""
        return redis_time_s(self.redis)

    def make_due(self) -> None:
        """Make every open unit due for the reaper's look."""
        for member in self.redis.zrange(self.keys.open, 0, -1):
            self.redis.zadd(self.keys.open, {str(text(cast(bytes, member))): 1})


@contextmanager
def forgotten(registry: TestRegistry) -> Iterator[None]:
    """Redis forgets what is written in the block, all at once: others may be reading."""
    before = {key: registry.redis.dump(key) or b"" for key in registry.redis.keys("*")}
    yield
    with registry.redis.pipeline() as forget:
        forget.flushdb()
        for key, value in before.items():
            forget.restore(key, 0, value)
        forget.execute()


def redis_time_s(client: redis.Redis) -> float:
    """The server's clock, in seconds since 1970."""
    seconds, microseconds = client.time()
    return seconds + microseconds / 1e6


def must_claim(leases: UnitLeases, ref: UnitRef, *, alone: bool = False) -> Claim:
    """A claim that must succeed."""
    claim = leases.claim(ref, alone=alone)
    assert not isinstance(claim, ClaimRefusal), claim
    return claim


def ok(index: int, record: str = "{}") -> PromptRecord:
    """The record of a prompt that succeeded: 5 tokens in, 2 of them cached, 3 out."""
    return PromptRecord(index, Outcome.OK, record, prompt_tokens=5, cached_tokens=2, output_tokens=3)


def failure(job_id: str, index: int, custom_id: str | None, code: str = "internal_error") -> PromptRecord:
    """The record of a line that failed."""
    context = RecordContext(job_id, "m", 0)
    if code == "internal_error":
        record = error_record(Failure.of_server("a fault"), index, custom_id, context)
    else:
        record = line_error_record(LineError("a bad line", code=code, index=index, custom_id=custom_id), context)
    return PromptRecord(index, Outcome.ERROR, encode_record(record))


def ended_job(
    registry: TestRegistry, failed: Mapping[int, tuple[str | None, str]], options: SubmitOptions | None = None
) -> str:
    """A job of LINES in which these failed: index -> custom_id and code of the record."""
    job_id, leases = registry.submit(LINES, options), registry.leases()
    assert (
        leases.planned(must_claim(leases, UnitRef.plan(job_id)), [NewShard(range(len(LINES)))], ageing_s=60.0)
        is PutStatus.UNIT_DONE
    )
    answers = [ok(index, '{"response": {"status_code": 200}}') for index in range(len(LINES)) if index not in failed]
    failures = [failure(job_id, index, *record) for index, record in failed.items()]
    leases.put(must_claim(leases, UnitRef.shard(job_id, 0)), [*answers, *failures])
    assert registry.status(job_id).status is JobState.COMPLETED
    return job_id


class RecordingAnnouncer(Announcer):
    """Notes the units it is told to announce; publishes nothing."""

    def __init__(self) -> None:
        super().__init__(Celery(set_as_current=False))
        self.announced: list[tuple[UnitRef, int]] = []
        self.models: list[str] = []

    def announce(self, ref: UnitRef, priority: int, model: str = "") -> None:
        self.announced.append((ref, priority))
        self.models.append(model)


@dataclass
class Units:
    """Runs units on the test's own thread."""

    registry: TestRegistry
    engine: FakeEngine
    engine_thread: EngineThread
    leases: UnitLeases
    writer: ResultWriter
    failures: list[BaseException]
    announcer: RecordingAnnouncer = field(default_factory=RecordingAnnouncer)
    held_units: HeldUnits = field(default_factory=HeldUnits)
    directory: ModelDirectory = field(init=False)  # of the last planner
    model_name: str = "fake"

    @property
    def closer(self) -> UnitCloser:
        return UnitCloser(self.leases, LimitSettings())

    def hold(self, ref: UnitRef) -> HeldUnit:
        return self.held_units.hold(must_claim(self.leases, ref), message_id="m")

    def runner(self, *, is_well: Callable[[], bool] = lambda: True, max_shards: int = 4) -> UnitRunner:
        return UnitRunner(
            self.leases,
            self.closer,
            self.held_units,
            ShardSlots(self.registry.shard_queue(), self.held_units, self.announcer, max_shards, turn=Turn()),
            Quarantine(self.held_units.send_shards_away, lambda: True),
            is_well=is_well,
        )

    def planner(self, *, shard_size: int = 2, known: Sequence[str] = ()) -> Planner:
        """The planner of a worker that serves `model_name`; jobs may wait for `known` models."""
        settings = WorkerSettings(shard_size=shard_size, result_batch_size=2)
        self.registry.serve(self.model_name, "tester")
        self.directory = self.registry.directory(known=known)
        return Planner(
            self.leases, self.announcer, self.closer, self.directory, settings=settings, limits=LimitSettings()
        )

    def run_job(self, job_id: str) -> None:
        """Plan a job of which nothing has run, and run its shards one after the other."""
        self.planner().plan(self.hold(UnitRef.plan(job_id)))
        for number in range(self.registry.status(job_id).shards_total):
            self.shard_run(self.hold(UnitRef.shard(job_id, number))).run()

    def shard_run(self, held: HeldUnit) -> ShardRun:
        served = ServedModel(self.engine, ModelSettings(name=self.model_name))
        prompts = ShardPrompts(held.claim, served, limits=LimitSettings())
        return ShardRun(held, prompts, ShardParts(self.leases, self.engine_thread, self.writer, self.closer))


@contextmanager
def running_units(
    registry: TestRegistry,
    engine: FakeEngine | None = None,
    *,
    max_open: int = 1000,
    lease_s: float = 30.0,
    model: str = "fake",
) -> Iterator[Units]:
    """Units of a worker that serves `model`; its engine thread and writer run for the length of the block."""
    engine = engine or FakeEngine()
    failures: list[BaseException] = []
    window = AdmissionWindow(max_open, ageing_s=60.0)
    engine_thread = EngineThread(lambda: engine, window=window, on_failure=failures.append)
    leases = registry.leases(lease_s=lease_s, models=[model])
    writer = ResultWriter(leases, batch_size=10, replace_refused=refused_record)
    engine_thread.start()
    try:
        with running_thread(writer.run):
            yield Units(registry, engine, engine_thread, leases, writer, failures, model_name=model)
    finally:
        engine_thread.stop(5)


@dataclass(frozen=True)
class OpenAIBatch:
    """A batch as OpenAI's package reads it, every line checked against its types."""

    batch: Batch
    output: dict[str, Any]  # custom_id -> body, as the package's type
    errors: dict[str | None, ErrorObject | BatchError]  # custom_id -> why there is no answer

    @classmethod
    def read(cls, registry: TestRegistry, job_id: str) -> Self:
        batch = Batch.model_validate(batch_object(registry.status(job_id)), strict=True)
        output: dict[str, Any] = {}
        errors: dict[str | None, ErrorObject | BatchError] = {}
        for raw in registry.records(job_id):
            record = json.loads(raw)
            assert record.keys() == {"id", "custom_id", "response", "error"}
            if BatchFile.of_record(record) is BatchFile.OUTPUT:
                output[record["custom_id"]] = _body(record)
            else:
                errors[record["custom_id"]] = _error(record)
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (len(output), len(errors))
        return cls(batch, output, errors)


def _body(record: dict[str, Any]) -> Any:
    response = record["response"]
    assert (response["status_code"], record["error"]) == (200, None)
    assert isinstance(response["request_id"], str)
    body = response["body"]
    return BODIES[body["object"]].model_validate(body, strict=True)


def _error(record: dict[str, Any]) -> ErrorObject | BatchError:
    if record["response"] is None:
        return BatchError.model_validate(record["error"], strict=True)
    assert record["error"] is None
    assert record["response"]["status_code"] != 200
    return ErrorObject.model_validate(record["response"]["body"]["error"], strict=True)


LOOK_INTERVAL_S = 0.03

# All shards of some jobs at one moment, behind the registry's own prelude: a shard is held until claim.lua would give
# it to another worker. ARGV what keys begin with, then job ids. Returns the time in us, then for each shard that is not
# done: its name, its tenant, who holds it (nobody: empty) and how many workers died over it.
_SHARDS = """
local rows, time = {}, redis.call('TIME')
local now = now_ms()
for i = 2, #ARGV do
  local job = redis.call('HMGET', ARGV[1] .. 'j:' .. ARGV[i] .. ':job', 'ns', 'tenant')
  for number = 0, tonumber(job[1] or 0) - 1 do
    local key = ARGV[1] .. 'j:' .. ARGV[i] .. ':s:' .. number
    local unit = redis.call('HMGET', key, 'st', 'own', 'lease', 'att', 'term', 'judged')
    if unit[1] then
      local may_be_claimed = is_over(unit[3], unit[5], now) and is_judged(unit[3], unit[6])
      local is_held = unit[1] == 'running' and not may_be_claimed
      local has_died = unit[1] == 'running' and may_be_claimed and is_gone(unit[3], unit[6])
      rows[#rows + 1] = {ARGV[i] .. '/' .. number, job[2], is_held and unit[2] or '', unit[4] + (has_died and 1 or 0)}
    end
  end
end
return {time[1], time[2], rows}
"""


class OpenShard(NamedTuple):
    """A shard that is not done, at one moment."""

    name: str
    tenant: str
    worker: str  # that holds it; "": none
    deaths: int  # of workers that held it


def idle_waits(shards: Sequence[OpenShard], workers: Collection[str], slots: int) -> set[str]:
    """Those shards that nobody holds though a worker that may run them has a free slot.

    One slot in eight is for tenants that have none there. A shard whose worker died runs alone: on a worker that holds
    no other. While such a one waits, others may have to.
    """
    held = {worker: [shard for shard in shards if shard.worker == worker] for worker in workers}
    is_idle = any(not of_worker for of_worker in held.values())
    waiting = [shard for shard in shards if not shard.worker]
    suspects = {shard.name for shard in waiting if shard.deaths}
    if suspects:
        return suspects if is_idle else set()

    def has_room(of_worker: Sequence[OpenShard], tenant: str) -> bool:
        if any(shard.deaths for shard in of_worker):
            return False  # it runs alone
        is_new = all(shard.tenant != tenant for shard in of_worker)
        return len(of_worker) < (slots if is_new else slots - slots // 8)

    return {shard.name for shard in waiting if any(has_room(found, shard.tenant) for found in held.values())}


class WaitWatch:
    """Looks at the shards of some jobs again and again, for the longest that one of them waited beside a free slot.

    Likewise for the longest that one was held by a worker that is not there, so that no other might claim it.
    """

    def __init__(self, client: redis.Redis, workers: Collection[str], slots: int) -> None:
        self.longest_wait_s = 0.0
        self.longest_held_by_dead_s = 0.0
        self.longest_gap_s = 0.0  # between two looks
        self.num_looks = 0
        self._look = client.register_script(script_source("prelude") + _SHARDS)
        self._workers = workers
        self._slots = slots

    def run(self, job_ids: Sequence[str], stopping: threading.Event) -> None:
        """Look until told to stop."""
        waits, held_by_dead = _Spells(), _Spells()
        before: float | None = None
        while not stopping.wait(LOOK_INTERVAL_S):
            seconds, micros, rows = self._look(args=[Keys().prefix, *job_ids])
            now = int(seconds) + int(micros) / 1e6
            before = now if before is None else before
            shards = [OpenShard(name.decode(), tenant.decode(), worker.decode(), n) for name, tenant, worker, n in rows]
            waits.look(idle_waits(shards, self._workers, self._slots), before, now)
            held_by_dead.look({s.name for s in shards if s.worker not in ("", *self._workers)}, before, now)
            self.longest_gap_s, before = max(self.longest_gap_s, now - before), now
            self.num_looks += 1
        self.longest_wait_s, self.longest_held_by_dead_s = waits.longest_s, held_by_dead.longest_s


class _Spells:
    """The longest time for which something was so, from the last look before it was to the first after it."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._since_s: dict[str, float] = {}

    def look(self, names: Collection[str], before_s: float, now_s: float) -> None:
        """Note of which it is so now; `before_s`: the time of the look before."""
        ended = [self._since_s.pop(name) for name in self._since_s.keys() - set(names)]
        self._since_s = {name: self._since_s.get(name, before_s) for name in names}
        self.longest_s = max((self.longest_s, *(now_s - begun for begun in (*ended, *self._since_s.values()))))
