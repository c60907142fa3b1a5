"""Prints a job's records as they are written, with redis-py alone: python poll_results.py REDIS_URL JOB_ID"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import redis


def poll(url: str, job_id: str) -> Iterator[str]:
    r = redis.Redis.from_url(url, decode_responses=True)
    key = f"millrace:{{s0}}:j:{job_id}"
    cursor = 0  # records seen: keep it, and another reader goes on from there
    while True:
        state = r.hget(f"{key}:job", "st")  # asked first: a record written before the end is then not missed
        indices = r.lrange(f"{key}:ord", cursor, cursor + 499)
        if indices:
            yield from map(str, r.hmget(f"{key}:res", indices))
            cursor += len(indices)
        elif state not in ("queued", "running"):  # done, failed, cancelled, expired, refused, or None: no such job
            return
        else:
            time.sleep(0.5)


if __name__ == "__main__":
    for record in poll(*sys.argv[1:3]):
        print(record, flush=True)
