from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import redis

from tests.support.doctor import configured, found_at
from tests.support.free_port import free_port
from tests.support.redis_server import private_redis
from tests.support.restartable_redis import restartable_redis
from tests.support.wait_until import wait_until
from worker.doctor.report import Level


def test_without_an_append_only_file_a_restart_loses_everything_and_the_fix_turns_it_on(redis_url: str) -> None:
    finding = found_at(redis_url)["redis persistence"]

    assert finding.level is Level.WARNING
    assert finding.detail.endswith("loses all jobs and results")
    assert "CONFIG SET appendonly yes" in str(finding.fix)


def test_with_snapshots_alone_it_loses_what_came_after_the_last(redis_url: str) -> None:
    with configured(redis_url, save="3600 1"):
        assert found_at(redis_url)["redis persistence"].detail.endswith("loses what came after the last snapshot")


@pytest.mark.parametrize(
    ("appendfsync", "level"), [("everysec", Level.OK), ("always", Level.OK), ("no", Level.WARNING)]
)
def test_how_often_the_file_is_flushed_counts(tmp_path: Path, appendfsync: str, level: Level) -> None:
    with restartable_redis(tmp_path, is_durable=True) as server, configured(server.url, appendfsync=appendfsync):
        finding = found_at(server.url)["redis persistence"]

    assert finding.level is level
    assert ("appendfsync everysec" in str(finding.fix)) is (level is Level.WARNING)


def test_a_disk_that_takes_no_more_fails(tmp_path: Path) -> None:
    with restartable_redis(tmp_path, is_durable=True) as server, redis.Redis.from_url(server.url) as client:
        client.set("a", "b")
        with server.no_larger_files():
            client.set("a", "b" * 4096)
            wait_until(lambda: client.info("persistence")["aof_last_write_status"] == "err")
            finding = found_at(server.url)["redis disk"]

    assert finding.level is Level.FAILED
    assert "the last append failed" in finding.detail


@pytest.mark.parametrize(("save", "level"), [("3600 1", Level.FAILED), ("", Level.WARNING)])
def test_a_snapshot_that_failed_stops_a_redis_that_makes_them_by_itself(
    tmp_path: Path, save: str, level: Level
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    with private_redis(tmp_path, port=free_port()) as url, configured(url, dir=str(gone), save=save) as client:
        shutil.rmtree(gone)
        client.bgsave()
        wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err")
        finding = found_at(url)["redis disk"]

    assert finding.level is level
    assert ("refuses to write" in finding.detail) is (level is Level.FAILED)
