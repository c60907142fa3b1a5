"""What `millrace doctor` says of the way to Redis: access, network, and the workers found there."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from pydantic import SecretStr

from settings import RedisSettings
from tests.support.redis_servers import (
    HOST,
    AclRedis,
    TcpProxy,
    acl_redis,
    configured,
    facts_at,
    found_at,
    free_port,
    redis_settings,
    tls_front,
)
from tests.support.registry import TestRegistry
from worker.doctor.redis import access_findings, redis_findings
from worker.doctor.redis_facts import RedisFacts
from worker.doctor.report import Level
from worker.registry.connect import RedisAddress
from worker.registry.models import Announcement, Heartbeats
from worker.schemas import SubmitOptions, WorkerInfo


@pytest.fixture
def at_most_a_second(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """At most a second of processor time and pauses; how long other processes run meanwhile does not count."""
    pauses: list[float] = []
    sleep = time.sleep

    def noted(seconds: float) -> None:
        pauses.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", noted)
    monkeypatch.setattr("redis.retry.sleep", noted)
    started_s = time.thread_time()
    yield
    assert time.thread_time() - started_s + sum(pauses) < 1


@pytest.mark.usefixtures("at_most_a_second")
def test_a_redis_that_is_not_there_is_said_at_once() -> None:
    findings = found_at(f"redis://127.0.0.1:{free_port()}/0")

    assert list(findings) == ["redis"]
    assert findings["redis"].level is Level.FAILED
    assert "start redis-server there" in str(findings["redis"].fix)


def test_one_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        findings = found_at(url, socket_timeout_s=0.2)

    assert findings["redis"].level is Level.FAILED
    assert "Timeout" in findings["redis"].detail


def test_a_wrong_password_has_a_fix_of_its_own(tmp_path: Path) -> None:
    with acl_redis(tmp_path, port=free_port()) as server:
        findings = found_at(server.url("millrace-worker", "guessed"))

    assert list(findings) == ["redis"]
    assert "the password of the ACL file" in str(findings["redis"].fix)


def test_a_certificate_of_nobody_we_trust_has_a_fix_of_its_own(redis_url: str, tmp_path: Path) -> None:
    with tls_front(int(facts_at(redis_url).info["tcp_port"]), tmp_path / "ca.pem") as port:
        finding = found_at(f"rediss://{HOST}:{port}/0")["redis"]

    assert finding.level is Level.FAILED
    assert "redis.ca_file" in str(finding.fix)


def test_so_has_a_port_that_is_not_encrypted(redis_url: str) -> None:
    finding = found_at(redis_url.replace("redis://", "rediss://"), socket_timeout_s=1)["redis"]

    assert finding.level is Level.FAILED
    assert "if this port is not encrypted" in str(finding.fix), finding


def test_a_url_that_is_refused_is_a_finding_and_not_asked() -> None:
    findings = found_at("redis://redis.example:6379/0")

    assert list(findings) == ["redis"]
    assert "without a password" in findings["redis"].detail


def test_a_redis_that_still_reads_its_file_is_waited_for(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_loading(*_: object) -> None:
        raise redis.BusyLoadingError("Redis is loading the dataset in memory")

    monkeypatch.setattr(RedisFacts, "ask", is_loading)

    [finding] = redis_findings(redis_settings(redis_url), redis_url)

    assert finding.fix == "wait until it has read its file from disk"


@pytest.mark.usefixtures("at_most_a_second")
def test_all_of_it_takes_less_than_a_second(redis_url: str) -> None:
    assert found_at(redis_url)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AclRedis]:
    with acl_redis(tmp_path_factory.mktemp("redis"), port=free_port()) as running:
        yield running


def test_a_default_user_without_a_password_is_a_warning(redis_url: str) -> None:
    findings = found_at(redis_url)

    assert findings["redis default user"].level is Level.WARNING
    assert "millrace acl" in str(findings["redis default user"].fix)
    assert findings["redis user"].detail == "we are default"


def test_who_may_get_in_without_protected_mode_is_said(redis_url: str) -> None:
    with configured(redis_url, protected_mode="no"):
        assert "whoever reaches the port" in found_at(redis_url)["redis default user"].detail


def test_a_default_user_with_a_password_may_still_do_too_much(redis_url: str) -> None:
    with configured(redis_url, requirepass="hunter2hunter2") as client:
        client.auth("hunter2hunter2")
        findings = found_at(redis_url.replace("redis://", "redis://:hunter2hunter2@"))

    assert findings["redis default user"].level is Level.OK
    assert findings["redis user"].level is Level.WARNING
    assert findings["redis user"].detail.endswith("+@all")


def test_our_own_users_are_well_and_asking_them_is_no_denial(server: AclRedis) -> None:
    server.admin.acl_log_reset()

    producer = found_at(server.producer_url)
    worker = found_at(server.worker_url, for_worker=True)

    for findings, name in ((producer, "millrace-producer"), (worker, "millrace-worker")):
        assert findings["redis default user"].level is Level.OK
        assert (findings["redis user"].level, findings["redis user"].detail) == (Level.OK, f"we are {name}")
        assert findings["redis permissions"].level is Level.OK
    assert "workers" in producer
    assert "workers" not in worker  # which may not look for others
    assert server.denials() == []


@pytest.mark.parametrize(
    ("rules", "beyond"),
    [("+@all", "+@all"), ("+@all -@dangerous", None), ("-@all +@read +config +flushall", "+config +flushall")],
)
def test_what_a_user_has_beyond_its_work_is_listed(server: AclRedis, rules: str, beyond: str | None) -> None:
    # What doctor asks; without ACL GETUSER it does not know the rules.
    asked = "+client|setname +client|setinfo +client|maint_notifications +hello +info +time +ping +acl|getuser"
    words = [*rules.split(), *asked.split(), "+script|exists"]
    server.admin.execute_command(  # type: ignore[no-untyped-call]  # redis-py has no types here
        "ACL", "SETUSER", "mine", "reset", "on", ">secret", "~*", *words
    )
    try:
        finding = found_at(server.url("mine", "secret"))["redis user"]
    finally:
        server.admin.acl_deluser("mine")

    if beyond is None:
        assert (finding.level, finding.detail) == (Level.OK, "we are mine, with no more than it needs")
    else:
        assert finding.level is Level.WARNING
        assert finding.detail.endswith(f": {beyond}")


def test_a_user_that_lacks_a_command_fails_with_its_name(server: AclRedis) -> None:
    finding = found_at(server.producer_url, for_worker=True)["redis permissions"]

    assert (finding.level, finding.detail) == (Level.FAILED, "a worker needs EXISTS unacked")
    assert "millrace acl" in str(finding.fix)


def test_tls_is_well(redis_url: str, tmp_path: Path) -> None:
    port = facts_at(redis_url).info["tcp_port"]
    with tls_front(int(port), tmp_path / "ca.pem") as tls_port:
        findings = found_at(f"rediss://{HOST}:{tls_port}/0", ca_file=tmp_path / "ca.pem")

    assert findings["redis encryption"].detail.startswith("TLS")


def test_a_plain_connection_is_well_within_a_machine_and_a_warning_beyond(redis_url: str) -> None:
    facts = facts_at(redis_url)
    elsewhere = RedisSettings(url=SecretStr("redis://me:secret@redis.example:6379/0"))
    assert found_at(redis_url)["redis encryption"].level is Level.OK

    far = list(access_findings(replace(facts, address=RedisAddress.of(elsewhere)), elsewhere))

    finding = next(finding for finding in far if finding.check == "redis encryption")
    assert finding.level is Level.WARNING
    assert "rediss://" in str(finding.fix)


@pytest.mark.parametrize(("mode", "is_warned"), [(0o600, False), (0o644, True)])
def test_a_password_file_that_others_may_read_is_a_warning(
    server: AclRedis, tmp_path: Path, mode: int, is_warned: bool
) -> None:
    file = tmp_path / "password"
    file.write_text("a-producer's p@ss/word\n")
    file.chmod(mode)

    findings = found_at(f"redis://millrace-producer@127.0.0.1:{server.port}/0", password_file=file)

    assert ("redis password file" in findings) is is_warned
    if is_warned:
        assert findings["redis password file"].fix == f"chmod 600 {file}"


def test_debug_commands_are_a_warning(redis_url: str) -> None:
    facts = facts_at(redis_url)
    with_debug = replace(facts, config={**facts.config, "enable-debug-command": "yes"})

    levels = {finding.check: finding.level for finding in access_findings(with_debug, RedisSettings())}

    assert levels["redis protected settings"] is Level.WARNING


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


def beat(registry: TestRegistry, name: str, version: str = "0.1.0") -> None:
    info = WorkerInfo(id=name, version=version, model="tiny", steps=1, open_requests=0, held=0)
    Heartbeats(registry.directory(), registry.keys).beat(info)


def test_workers_are_told_with_their_version_and_model(redis_url: str, registry: TestRegistry) -> None:
    beat(registry, "a")
    beat(registry, "b")

    finding = found_at(redis_url)["workers"]

    assert (finding.level, finding.detail) == (Level.OK, "2 up, version 0.1.0, with tiny")


def test_workers_of_two_versions_are_a_warning(redis_url: str, registry: TestRegistry) -> None:
    beat(registry, "a")
    beat(registry, "b", version="0.2.0")

    finding = found_at(redis_url)["workers"]

    assert finding.level is Level.WARNING
    assert "version 0.1.0, 0.2.0" in finding.detail


def test_jobs_without_a_worker_are_a_warning_that_says_how_to_start_one(redis_url: str, registry: TestRegistry) -> None:
    registry.submit([b'{"prompt": "a"}'])

    finding = found_at(redis_url)["workers"]

    assert (finding.level, finding.detail) == (Level.WARNING, "none is up, and 1 job waits for one")
    assert "millrace worker --model DIR" in str(finding.fix)


def test_jobs_that_wait_for_a_model_are_a_warning_that_names_it(redis_url: str, registry: TestRegistry) -> None:
    for _ in range(2):
        registry.submit([b'{"prompt": "a"}'], SubmitOptions(model="bge-small"))
    registry.serve("tiny")
    beat(registry, "a")

    finding = found_at(redis_url)["models"]

    assert (finding.level, finding.detail) == (Level.WARNING, "no worker serves bge-small, for which 2 jobs wait")
    assert "millrace cancel JOB" in str(finding.fix)
    registry.serve("bge-small")
    assert "models" not in found_at(redis_url)


def test_workers_of_one_model_that_take_different_lengths_are_a_warning(redis_url: str, registry: TestRegistry) -> None:
    for worker_id, tokens in (("a", 4096), ("b", 32_768), ("c", 4096)):
        registry.directory(worker_id).announce(Announcement(name="tiny", context_tokens=tokens))

    finding = found_at(redis_url)["models"]

    assert (finding.level, finding.detail) == (Level.WARNING, "workers of tiny take 4,096 or 32,768 tokens a request")


def test_jobs_with_a_worker_are_well(redis_url: str, registry: TestRegistry) -> None:
    registry.submit([b'{"prompt": "a"}'])
    beat(registry, "a")

    assert found_at(redis_url)["workers"].level is Level.OK


def test_an_idle_queue_needs_no_worker(redis_url: str) -> None:
    assert found_at(redis_url)["workers"].level is Level.OK


def test_a_heartbeat_of_another_version_is_a_warning_and_no_traceback(redis_url: str, registry: TestRegistry) -> None:
    registry.redis.hset(f"{registry.keys.workers}a", mapping={"version": "9.0", "mood": "good"})

    finding = found_at(redis_url)["workers"]

    assert finding.level is Level.WARNING
    assert "another version" in finding.detail
