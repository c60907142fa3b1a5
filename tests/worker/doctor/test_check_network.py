from __future__ import annotations

import time

import pytest
import redis

from tests.support.doctor import found_at
from tests.support.tcp_proxy import TcpProxy
from worker.doctor.report import Level


def test_a_redis_at_hand_is_near_and_tells_the_same_time(redis_url: str) -> None:
    findings = found_at(redis_url)

    assert findings["redis latency"].level is Level.OK
    assert findings["clock"].level is Level.OK


def test_a_redis_that_is_far_away_is_a_warning_with_the_round_trip(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        proxy = TcpProxy(client.connection_pool.connection_kwargs["port"])
    proxy.latency_s = 0.012  # each way
    try:
        finding = found_at(f"redis://127.0.0.1:{proxy.port}/0")["redis latency"]
    finally:
        proxy.close()

    assert finding.level is Level.WARNING
    assert 24 <= float(finding.detail.partition(" ms")[0]) < 100


@pytest.mark.parametrize(("ahead_s", "said"), [(3600.0, "behind"), (-3600.0, "ahead of")])
def test_a_clock_that_is_off_is_a_warning_and_leases_are_not_in_danger(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, ahead_s: float, said: str
) -> None:
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + ahead_s)

    finding = found_at(redis_url)["clock"]

    assert finding.level is Level.WARNING
    assert f"ms {said} this machine's" in finding.detail
    assert finding.detail.startswith(("Redis's is 3,600,", "Redis's is 3,599,"))
    assert "leases, deadlines and ageing go by Redis's clock alone" in finding.detail
    assert "timedatectl" in str(finding.fix)
