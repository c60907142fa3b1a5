"""Polling with redis-py and nothing of ours."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.support.registry import TestRegistry, must_claim, ok
from worker.registry.keys import UnitRef

SCRIPT = Path(__file__).with_name("poll_results.py")


def test_records_come_while_the_job_runs_and_the_reader_ends_with_it(redis_url: str) -> None:
    registry = TestRegistry.at(redis_url)
    job_id = registry.running_job([0, 1, 2])
    leases = registry.leases()
    shard = must_claim(leases, UnitRef.shard(job_id, 0))
    leases.put(shard, [ok(2, '{"i": 2}')])
    with subprocess.Popen([sys.executable, "-W", "error", SCRIPT, redis_url, job_id], stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert json.loads(reader.stdout.readline()) == {"i": 2}
        leases.put(shard, [ok(0, '{"i": 0}'), ok(1, '{"i": 1}')])
        assert [json.loads(line)["i"] for line in reader.stdout] == [0, 1]
        assert reader.wait(timeout=10) == 0
    registry.redis.close()


def test_nothing_of_ours_is_imported() -> None:
    assert not re.search(r"^\s*(import|from) (worker|engine|settings|kernels)", SCRIPT.read_text(), re.MULTILINE)
