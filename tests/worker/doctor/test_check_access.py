from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import SecretStr

from settings import RedisSettings
from tests.support.acl_redis import AclRedis, acl_redis
from tests.support.doctor import configured, facts_at, found_at
from tests.support.free_port import free_port
from tests.support.tls_front import HOST, tls_front
from worker.doctor.report import Level
from worker.doctor.server import access_findings
from worker.registry.connect import RedisAddress


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


def test_a_default_user_with_a_password_lets_nobody_in_and_may_still_do_too_much(redis_url: str) -> None:
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
    # What doctor asks; ACL GETUSER, without which its rules are not to be known.
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
