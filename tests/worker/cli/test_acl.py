from __future__ import annotations

import hashlib
from pathlib import Path

from click.testing import CliRunner, Result

from worker.cli import admin


def acl(tmp_path: Path, *options: str) -> Result:
    files = ["--producer-password-file", str(tmp_path / "producer"), "--worker-password-file", str(tmp_path / "worker")]
    return CliRunner().invoke(admin.acl, [*files, *options], standalone_mode=False)


def test_the_file_holds_the_digests_of_the_passwords_and_not_the_passwords(tmp_path: Path) -> None:
    result = acl(tmp_path, "--generate", "--admin-password-file", str(tmp_path / "admin"))

    assert result.exit_code == 0, result.exception
    lines = result.stdout.splitlines()
    assert [line.split()[1] for line in lines] == [
        "default",
        "millrace-health",
        "millrace-producer",
        "millrace-worker",
        "millrace-admin",
    ]
    for line, name in zip(lines[2:], ("producer", "worker", "admin"), strict=True):
        password = (tmp_path / name).read_text().strip()
        assert f" #{hashlib.sha256(password.encode()).hexdigest()} " in line
        assert password not in result.output


def test_once_more_is_the_same_file(tmp_path: Path) -> None:
    assert acl(tmp_path, "--generate").stdout == acl(tmp_path, "--generate").stdout == acl(tmp_path).stdout


def test_it_is_written_where_it_is_wanted(tmp_path: Path) -> None:
    expected = acl(tmp_path, "--generate").stdout

    assert acl(tmp_path, "-o", str(tmp_path / "users.acl")).exit_code == 0
    assert (tmp_path / "users.acl").read_text() == expected


def test_without_a_password_there_is_no_acl_file(tmp_path: Path) -> None:
    result = acl(tmp_path)

    assert "producer: No such file" in str(result.exception)
    assert "--generate" in str(result.exception)
    assert result.stdout == ""


def test_two_users_with_one_password_are_refused(tmp_path: Path) -> None:
    (tmp_path / "producer").write_text("the same password\n")
    (tmp_path / "worker").write_text("the same password\n")

    assert "two users have the same password" in str(acl(tmp_path).exception)


def test_a_redis_that_is_too_old_is_refused(tmp_path: Path) -> None:
    for version in ("6.0", "five", "7", ""):
        assert "accepted: 6.2 or later" in str(acl(tmp_path, "--generate", "--redis-version", version).exception)
