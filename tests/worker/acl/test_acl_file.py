from __future__ import annotations

import hashlib

import pytest

from worker.acl import RedisUser, acl_file

USER = RedisUser("somebody", ("a:*", "b"), ("get", "script|load"))
HEALTH = "user millrace-health reset on nopass resetchannels -@all +ping"


def test_the_default_user_is_off_with_every_right_and_a_user_has_what_it_was_given_and_no_more() -> None:
    digest = hashlib.sha256(b"a long enough password").hexdigest()

    assert acl_file({USER: "a long enough password"}, (7, 0)).splitlines() == [
        "user default reset off ~* &* +@all",
        HEALTH,
        f"user somebody reset on #{digest} resetchannels ~a:* ~b -@all +client|setname +get +script|load",
    ]


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
