"""Submits jobs to be disturbed, and checks that their records are those of an undisturbed run."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, cast

import redis

from settings import LimitSettings, ModelSettings
from tests.chaos.faults import lanes
from tests.support.fake_engine import FakeEngine
from tests.support.processes import wait_until
from worker.client import BatchClient
from worker.lines.request_line import ANY_MODEL
from worker.offline import LineFeed, OfflineRun
from worker.records.record import encode_record
from worker.registry.keys import Keys
from worker.schemas import JobState

T = TypeVar("T")
GRACE_S = 1.0

Record = dict[str, Any]
WINDOW = 64

# What a killed worker had not acknowledged comes back after the visibility timeout (4 s in tests) and the next sweep.
DRAIN_TIMEOUT_S = 20.0

# One script, so that the counters and the work they count are of one moment. ARGV: what keys begin with.
_OPEN_WORK = """
local counters, work = {}, {}
local function add(into, name, prompts, bytes, jobs)
  local sum = into[name] or {0, 0, 0}
  into[name] = {sum[1] + prompts, sum[2] + bytes, sum[3] + jobs}
end
for _, key in ipairs(redis.call('KEYS', ARGV[1] .. 'j:*:job')) do
  local job = redis.call('HMGET', key, 'st', 'n', 'bytes', 'tenant')
  if job[1] == 'queued' or job[1] == 'running' then
    local open = tonumber(job[2]) - redis.call('HLEN', string.sub(key, 1, -4) .. 'res')
    add(work, '', open, tonumber(job[3]), 1)
    add(work, ':t:' .. job[4], open, tonumber(job[3]), 1)
  end
end
local totals = redis.call('KEYS', ARGV[1] .. 'adm:t:*')
totals[#totals + 1] = ARGV[1] .. 'adm'
for _, key in ipairs(totals) do
  local sums = redis.call('HMGET', key, 'prompts', 'bytes', 'jobs')
  add(counters, string.sub(key, #ARGV[1] + 4), tonumber(sums[1] or 0), tonumber(sums[2] or 0), tonumber(sums[3] or 0))
end
return cjson.encode({counters, work})
"""

# Likewise. Of every open job: each line has a record or lies in exactly one unit; what a unit says that is done is what
# has records; no holder knows of more (`known`: of workers with WorkerOptions.notes_known), or of fewer by more than a
# write. ARGV[2]: records of one write.
_WHOLENESS = """
local found = {}
local function check(is_so, text) if not is_so then found[#found + 1] = text end end
for _, key in ipairs(redis.call('KEYS', ARGV[1] .. 'j:*:job')) do
  local base = string.sub(key, 1, -4)
  local job = redis.call('HMGET', key, 'st', 'n', 'ns', 'sd', 'ok', 'err')
  if job[1] == 'queued' or job[1] == 'running' then
    local lines, num_units = {}, 0
    for number = -1, tonumber(job[3]) - 1 do
      local name = base .. 's:' .. (number < 0 and 'plan' or number)
      local unit = redis.call('HMGET', name, 'st', 'idx', 'n', 'done', 'known')
      local num_done = 0
      local function take(index)
        local is_done = redis.call('HEXISTS', base .. 'res', index) == 1
        if is_done then num_done = num_done + 1 end
        check(not lines[index], name .. ': line ' .. index .. ' is in two units')
        lines[index] = true
      end
      if unit[1] and number < 0 then for index = 0, tonumber(job[2]) - 1 do take(tostring(index)) end end
      if unit[1] and number >= 0 then
        for index in string.gmatch(unit[2], '%d+') do take(index) end
        num_units = num_units + 1
      end
      local told = name .. ': done ' .. tostring(unit[4])
      check(not unit[1] or tonumber(unit[4]) == num_done, told .. ', records ' .. num_done)
      if unit[1] == 'running' and unit[5] then
        local ahead = unit[4] - unit[5]
        check(ahead >= 0 and ahead <= tonumber(ARGV[2]), told .. ', its holder knows of ' .. unit[5])
      end
    end
    for index = 0, tonumber(job[2]) - 1 do
      local has_record = redis.call('HEXISTS', base .. 'res', index) == 1
      check(has_record or lines[tostring(index)], base .. ': line ' .. index .. ' is nowhere')
    end
    local num_records = redis.call('HLEN', base .. 'res')
    check(num_units == job[3] - job[4], base .. ': units ' .. num_units .. ' of ' .. job[3] .. ' less ' .. job[4])
    local is_same = num_records == redis.call('LLEN', base .. 'ord') and num_records == job[5] + job[6]
    check(is_same, base .. ': records ' .. num_records)
  end
end
return cjson.encode({#found, {unpack(found, 1, 5)}})
"""


@contextmanager
def impatient_client(redis_url: str) -> Iterator[BatchClient]:
    """A client whose jobs are announced again after a second, not half a minute, if their message is lost."""
    with BatchClient(redis_url) as client:
        client._intake._grace_s = GRACE_S
        yield client


def prompts(count: int, *, of: str = "job") -> list[dict[str, str]]:
    """Lines for the fake engine."""
    return [{"custom_id": f"{of}-{number}", "prompt": f"{of}, prompt {number}"} for number in range(count)]


def submit_jobs(client: BatchClient, num_jobs: int, num_prompts: int) -> dict[str, dict[str, Record]]:
    """Submit jobs of two tenants and several priorities; the records that each must end with, by its id."""
    jobs = {}
    for number in range(num_jobs):
        lines = prompts(num_prompts, of=f"job {number}")
        job_id = client.submit(lines, tenant=f"tenant-{number % 2}", priority=(5, 2, 8)[number % 3])
        jobs[job_id] = undisturbed(lines)
    return jobs


def wait_all(client: BatchClient, jobs: dict[str, dict[str, Record]], timeout_s: float = 45.0) -> None:
    """Wait until every job has ended; 45 s is what a lease and a grace of production allow."""
    until_s = time.monotonic() + timeout_s
    for job_id in jobs:
        insist(partial(_wait, client, job_id, until_s), timeout_s)


def _wait(client: BatchClient, job_id: str, until_s: float) -> None:
    client.wait(job_id, max(until_s - time.monotonic(), 0.1))


def was_claimed_again(bare: redis.Redis) -> bool:
    """Whether some unfinished shard was claimed a second time, after its first lease ran out."""
    return any(bare.hget(shard, "fence") == b"2" for shard in bare.scan_iter("millrace:*:s:[0-9]*"))


def insist(call: Callable[[], T], timeout_s: float = 30.0) -> T:
    """Call until Redis can be had; what `call` returned. Raises redis.RedisError after `timeout_s` seconds."""
    until_s = time.monotonic() + timeout_s
    while True:
        try:
            return call()
        except redis.RedisError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.1)


def content(record: Mapping[str, Any]) -> Record:
    """The record without what belongs to its job or its moment: ids, time of creation, tokens the cache saved."""
    kept = copy.deepcopy(dict(record))
    del kept["id"]
    response = kept["response"]
    if response is not None:
        del response["request_id"]
        body = response["body"]
        for name in ("id", "created"):
            body.pop(name, None)
        if "usage" in body:
            body["usage"].pop("prompt_tokens_details", None)  # none of embeddings
    return kept


def contents(records: Iterable[Mapping[str, Any]]) -> dict[str, Record]:
    """Content by custom_id; two records of one prompt are a failure."""
    found: dict[str, Record] = {}
    for record in records:
        assert record["custom_id"] not in found, f"two records of {record['custom_id']}"
        found[record["custom_id"]] = content(record)
    return found


def undisturbed(lines: Iterable[Mapping[str, Any]], model: str | None = None) -> dict[str, Record]:
    """The contents of an offline run of these lines with the fake engine, in this process.

    model: the name of one, which is the engine's salt too; it runs every line, whatever that names.
    """
    records: list[Mapping[str, Any]] = []
    settings = ModelSettings() if model is None else ModelSettings(name=model, aliases=ANY_MODEL)
    run = OfflineRun(
        FakeEngine(salt=model or ""),
        settings,
        window=WINDOW,
        write=lambda record: records.append(json.loads(encode_record(record))),
    )
    raw_lines = [json.dumps(line).encode() for line in lines]
    feed = LineFeed(raw_lines, LimitSettings(), capacity=WINDOW, by_prefix=True)
    feed.start()
    run.run(feed, _never, lambda: None)
    return contents(records)


def _never() -> bool:
    return False


def check_counters(bare: redis.Redis) -> None:
    """Check that the counters, of all and of each tenant, are the open work."""
    counters, work = json.loads(cast(bytes, bare.eval(_OPEN_WORK, 0, Keys().prefix)))
    nothing = [0, 0, 0]
    for name in {*counters, *work}:
        counted, open_ = counters.get(name, nothing), work.get(name, nothing)
        assert counted == open_, f"adm{name}: prompts, bytes, jobs are {counted}, the open work is {open_}"


def check_wholeness(bare: redis.Redis, *, batch_size: int) -> None:
    """Check that no line of an open job is lost or twice in work, see _WHOLENESS; batch_size: records of one write."""
    count, examples = json.loads(cast(bytes, bare.eval(_WHOLENESS, 0, Keys().prefix, batch_size)))
    assert count == 0, examples


def check_invariants(client: BatchClient, bare: redis.Redis, jobs: Mapping[str, Mapping[str, Record]]) -> None:
    """Check that all jobs are complete, with the records of an undisturbed run, and that nothing else is left."""
    for job_id, expected in jobs.items():
        status = client.status(job_id)
        assert status.status is JobState.COMPLETED, (job_id, status)
        check_records(client, bare, job_id, num_prompts=len(expected))
        found = contents(client.results(job_id))
        assert found.keys() == expected.keys()
        different = [name for name in expected if found[name] != expected[name]]
        assert not different, (job_id, different[:5], found[different[0]], expected[different[0]])
    check_nothing_is_left(bare)


def check_records(client: BatchClient, bare: redis.Redis, job_id: str, *, num_prompts: int) -> None:
    """Check that a finished job has one record a prompt, in the order of completion, and that its counts agree."""
    keys = Keys()
    status = client.status(job_id)
    assert status.status.is_terminal, status
    order = cast("list[bytes]", bare.lrange(keys.order(job_id), 0, -1))
    assert sorted(map(int, order)) == list(range(num_prompts))
    assert bare.hlen(keys.records(job_id)) == num_prompts
    counts = status.request_counts
    assert (counts.total, counts.finished) == (num_prompts, num_prompts)


def check_nothing_is_left(bare: redis.Redis) -> None:
    """Check that no open work, message or counter is left, nor a job's key that Redis would keep for ever."""
    keys = Keys()
    wait_until(lambda: not any(bare.llen(lane) for lane in lanes(bare)), timeout_s=DRAIN_TIMEOUT_S)
    wait_until(lambda: not bare.exists("unacked", "unacked_index"), timeout_s=DRAIN_TIMEOUT_S)
    assert bare.zcard(keys.open) == 0
    assert not list(bare.scan_iter(f"{keys.queued}*"))
    check_counters(bare)
    counters: dict[bytes, Any] = cast("dict[bytes, Any]", bare.hgetall(keys.counters))
    assert [int(counters.get(name, 0)) for name in (b"prompts", b"bytes", b"jobs")] == [0, 0, 0]
    assert not list(bare.scan_iter(f"{keys.counters}:t:*"))
    for key in [*bare.scan_iter(f"{keys.prefix}j:*"), *bare.scan_iter(f"{keys.prefix}idem:*")]:
        assert bare.ttl(key) > 0, f"{key!r} is kept for ever"
