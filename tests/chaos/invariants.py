"""What must hold whatever happened."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

import redis

from tests.chaos.faults import lanes
from tests.chaos.undisturbed import Record, contents
from tests.support.wait_until import wait_until
from worker.client import BatchClient
from worker.registry.keys import Keys
from worker.schemas import JobState

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
for _, key in ipairs(redis.call('KEYS', ARGV[1] .. 'adm*')) do
  local sums = redis.call('HMGET', key, 'prompts', 'bytes', 'jobs')
  add(counters, string.sub(key, #ARGV[1] + 4), tonumber(sums[1] or 0), tonumber(sums[2] or 0), tonumber(sums[3] or 0))
end
return cjson.encode({counters, work})
"""


def check_admission(bare: redis.Redis) -> None:
    """The admission counters, of all and of each tenant, are the open work."""
    counters, work = json.loads(cast(bytes, bare.eval(_OPEN_WORK, 0, Keys().prefix)))
    nothing = [0, 0, 0]
    for name in {*counters, *work}:
        assert counters.get(name, nothing) == work.get(name, nothing), f"adm{name}: prompts, bytes, jobs"


def check_invariants(client: BatchClient, bare: redis.Redis, jobs: Mapping[str, Mapping[str, Record]]) -> None:
    """After the end of a scenario whose jobs, by id, must all be complete and as if nothing had happened."""
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
    """A finished job has one record a prompt, each once in the order of completion, and its counts agree."""
    keys = Keys()
    status = client.status(job_id)
    assert status.status.is_terminal, status
    order = cast("list[bytes]", bare.lrange(keys.order(job_id), 0, -1))
    assert sorted(map(int, order)) == list(range(num_prompts))
    assert bare.hlen(keys.records(job_id)) == num_prompts
    counts = status.request_counts
    assert (counts.total, counts.finished) == (num_prompts, num_prompts)


def check_nothing_is_left(bare: redis.Redis) -> None:
    """No open work, no message, no counter, and no key of a job that Redis would keep for ever."""
    keys = Keys()
    wait_until(lambda: not any(bare.llen(lane) for lane in lanes()), timeout_s=DRAIN_TIMEOUT_S)
    wait_until(lambda: not bare.exists("unacked", "unacked_index"), timeout_s=DRAIN_TIMEOUT_S)
    assert bare.zcard(keys.open) == 0
    assert not list(bare.scan_iter(f"{keys.queued}*"))
    check_admission(bare)
    counters: dict[bytes, Any] = cast("dict[bytes, Any]", bare.hgetall(keys.admission))
    assert [int(counters.get(name, 0)) for name in (b"prompts", b"bytes", b"jobs")] == [0, 0, 0]
    assert not list(bare.scan_iter(f"{keys.admission}:t:*"))
    for key in [*bare.scan_iter(f"{keys.prefix}j:*"), *bare.scan_iter(f"{keys.prefix}idem:*")]:
        assert bare.ttl(key) > 0, f"{key!r} is kept for ever"
