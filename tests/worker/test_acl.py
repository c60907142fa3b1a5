"""The users of the Redis ACL: what each may do, their file and their passwords."""

from __future__ import annotations

import hashlib
import re
import stat
from importlib import resources
from pathlib import Path

import pytest

from worker.acl import (
    FLOWER,
    PRODUCER,
    SERVER,
    WORKER,
    RedisUser,
    UnusablePassword,
    acl_file,
    generate_password,
    read_password,
)
from worker.registry import scripts

# With these a producer stages, submits, reads, cancels and deletes, and closes units of a cancelled job nobody runs.
PRODUCER_SCRIPTS = (
    *("cancel", "claim", "delete", "discard", "page", "put", "release", "renew", "stage", "submit"),
    "change_callback",
)
SERVER_SCRIPTS = (*PRODUCER_SCRIPTS, "copy_file", "keep_file", "queue", "take_callback", "settle_callback")
SCRIPTS = sorted(
    entry.name.removesuffix(".lua") for entry in resources.files(scripts).iterdir() if ".lua" in entry.name
)

USER = RedisUser("somebody", ("a:*", "b"), ("get", "script|load"))
HEALTH = "user millrace-health reset on nopass resetchannels -@all +ping"


def commands_of(script: str) -> set[str]:
    source = resources.files(scripts).joinpath(f"{script}.lua").read_text(encoding="ascii")
    commands = {name.lower() for name in re.findall(r"redis\.p?call\(\s*['\"](\w+)['\"]", source)}
    assert len(re.findall(r"redis\.p?call", source)) == len(re.findall(r"redis\.p?call\(\s*['\"]\w+['\"]", source)), (
        f"{script}.lua calls a command whose name is computed: nobody can grant that"
    )
    return commands


def missing(commands: set[str], granted: tuple[str, ...]) -> set[str]:
    return commands - set(granted)


@pytest.mark.parametrize("script", sorted({*SCRIPTS} - {"copy_file", "keep_file"}))
def test_a_worker_may_call_what_a_script_calls(script: str) -> None:
    lacking = missing(commands_of(script), WORKER.commands)
    assert not lacking, f"{script}.lua calls {lacking}: grant them in worker/acl.py, or do without"


@pytest.mark.parametrize("script", [*PRODUCER_SCRIPTS, "prelude"])
def test_a_producer_may_call_what_its_scripts_call(script: str) -> None:
    lacking = missing(commands_of(script), PRODUCER.commands)
    assert not lacking, f"{script}.lua calls {lacking}: grant them in worker/acl.py, or do without"


@pytest.mark.parametrize("script", [*SERVER_SCRIPTS, "prelude"])
def test_a_server_may_call_what_its_scripts_call(script: str) -> None:
    lacking = missing(commands_of(script), SERVER.commands)
    assert not lacking, f"{script}.lua calls {lacking}: grant them in worker/acl.py, or do without"


def test_nobody_is_granted_a_category_or_a_whole_container_command() -> None:
    for user in (PRODUCER, WORKER, SERVER, FLOWER):
        assert not [command for command in user.commands if command.startswith("@")]
        assert not {"client", "config", "script", "acl", "debug", "module", "eval", "keys"} & set(user.commands)
        assert len(set(user.commands)) == len(user.commands)


def test_only_a_worker_takes_messages() -> None:
    assert "brpop" in WORKER.commands
    assert not {"brpop", "rpop", "lpop"} & {*PRODUCER.commands, *SERVER.commands}
    assert not [pattern for pattern in PRODUCER.key_patterns if pattern.startswith("unacked") or pattern in ("*", "~*")]


def test_only_a_worker_sends_events_and_only_flower_hears_them() -> None:
    may = {user.name: {"publish", "psubscribe"} & set(user.commands) for user in (PRODUCER, WORKER, FLOWER)}
    assert may == {"millrace-producer": set(), "millrace-worker": {"publish"}, "millrace-flower": {"psubscribe"}}
    assert PRODUCER.channels == ()
    assert all(".celeryev/" in channel for channel in (*WORKER.channels, *FLOWER.channels))


def test_only_a_server_sees_files_and_keys() -> None:
    assert not [pattern for pattern in PRODUCER.key_patterns if pattern.endswith((":f:*", ":files:*", ":keys"))]
    assert {"millrace:{*}:f:*", "millrace:{*}:files:*", "millrace:{*}:keys"} < set(SERVER.key_patterns)


def test_flower_reads_neither_jobs_nor_the_queue() -> None:
    assert all("celeryev" in pattern for pattern in FLOWER.key_patterns)


def test_the_default_user_is_off_and_another_has_the_rights_given_to_it() -> None:
    digest = hashlib.sha256(b"a long enough password").hexdigest()

    assert acl_file({USER: "a long enough password"}, (7, 0)).splitlines() == [
        "user default reset off ~* &* +@all",
        HEALTH,
        f"user somebody reset on #{digest} resetchannels ~a:* ~b -@all +client|setname +get +script|load",
    ]


def test_workers_and_servers_alone_may_send_to_a_queue_for_callbacks() -> None:
    passwords = {user: f"{user.name}, long enough" for user in (PRODUCER, WORKER, SERVER)}
    before, lines = acl_file(passwords, (8, 0)).splitlines(), acl_file(passwords, (8, 0), ["done"]).splitlines()
    more = {new.split()[1]: set(new.split()) - set(old.split()) for old, new in zip(before, lines, strict=True)}
    granted = {"~done", "~done??[0-9]", "~_kombu.binding.done", "~_kombu.binding_permanent.done"}
    assert {name: rules for name, rules in more.items() if rules} == {WORKER.name: granted, SERVER.name: granted}


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ((6, 2), ["client|setname", "client|setinfo", "client|maint_notifications"]),
        ((7, 0), ["client|setname"]),  # it would refuse to start with a subcommand that it does not know
        ((7, 2), ["client|setname", "client|setinfo"]),
        ((8, 4), ["client|setname", "client|setinfo"]),
    ],
)
def test_each_version_gets_the_subcommands_that_it_knows(version: tuple[int, int], expected: list[str]) -> None:
    rules = acl_file({USER: "a long enough password"}, version).splitlines()[-1].split()
    assert [rule[1:] for rule in rules if rule.startswith("+client")] == expected


def test_a_password_is_one_line_without_its_end(tmp_path: Path) -> None:
    for number, end in enumerate((b"", b"\n", b"\r\n")):
        file = tmp_path / str(number)
        file.write_bytes("sixteen ch\u00e4racters".encode() + end)
        assert read_password(file) == "sixteen ch\u00e4racters"


@pytest.mark.parametrize(
    "data",
    [b"", b"\n", b"fifteen letters", b"two lines\nof text, long", b"\xff" * 20, b"x" * 513, b"a null \0 and more text"],
)
def test_what_is_no_password_is_refused_and_not_shown(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "password"
    file.write_bytes(data)
    with pytest.raises(UnusablePassword, match="accepted: one line") as caught:
        read_password(file)
    assert str(file) in str(caught.value)
    assert "letters" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnusablePassword, match="none: No such file"):
        read_password(tmp_path / "none")


def test_a_generated_password_is_long_its_owners_alone_and_kept(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    generate_password(first)
    generate_password(second)

    password = read_password(first)
    generate_password(first)

    assert read_password(first) == password != read_password(second)
    assert len(password) >= 40
    assert stat.S_IMODE(first.stat().st_mode) == 0o600


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnusablePassword, match="none/password: No such file"):
        generate_password(tmp_path / "none" / "password")
