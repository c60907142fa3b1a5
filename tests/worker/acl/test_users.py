"""What each user may do. That it suffices, and that the rest is denied, a Redis says: tests/chaos/test_acl.py."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from worker.acl import FLOWER, PRODUCER, WORKER
from worker.registry import scripts

# With these a producer stages, submits, reads and cancels, and closes the units of a cancelled job that nobody runs.
PRODUCER_SCRIPTS = ("cancel", "claim", "discard", "page", "put", "release", "renew", "stage", "submit", "prelude")
SCRIPTS = sorted(
    entry.name.removesuffix(".lua") for entry in resources.files(scripts).iterdir() if ".lua" in entry.name
)


def commands_of(script: str) -> set[str]:
    source = resources.files(scripts).joinpath(f"{script}.lua").read_text(encoding="ascii")
    commands = {name.lower() for name in re.findall(r"redis\.p?call\(\s*['\"](\w+)['\"]", source)}
    assert len(re.findall(r"redis\.p?call", source)) == len(re.findall(r"redis\.p?call\(\s*['\"]\w+['\"]", source)), (
        f"{script}.lua calls a command whose name is computed: nobody can grant that"
    )
    return commands


def missing(commands: set[str], granted: tuple[str, ...]) -> set[str]:
    return commands - set(granted)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_worker_may_call_what_a_script_calls(script: str) -> None:
    lacking = missing(commands_of(script), WORKER.commands)
    assert not lacking, f"{script}.lua calls {lacking}: grant them in worker/acl.py, or do without"


@pytest.mark.parametrize("script", PRODUCER_SCRIPTS)
def test_a_producer_may_call_what_its_scripts_call(script: str) -> None:
    lacking = missing(commands_of(script), PRODUCER.commands)
    assert not lacking, f"{script}.lua calls {lacking}: grant them in worker/acl.py, or do without"


def test_nobody_is_granted_a_category_or_a_whole_container_command() -> None:
    for user in (PRODUCER, WORKER, FLOWER):
        assert not [command for command in user.commands if command.startswith("@")]
        assert not {"client", "config", "script", "acl", "debug", "module", "eval", "keys"} & set(user.commands)
        assert len(set(user.commands)) == len(user.commands)


def test_only_a_worker_takes_messages() -> None:
    assert "brpop" in WORKER.commands
    assert not {"brpop", "rpop", "lpop"} & set(PRODUCER.commands)
    assert not [pattern for pattern in PRODUCER.key_patterns if pattern.startswith("unacked") or pattern in ("*", "~*")]


def test_only_a_worker_sends_events_and_only_flower_hears_them() -> None:
    may = {user.name: {"publish", "psubscribe"} & set(user.commands) for user in (PRODUCER, WORKER, FLOWER)}
    assert may == {"millrace-producer": set(), "millrace-worker": {"publish"}, "millrace-flower": {"psubscribe"}}
    assert PRODUCER.channels == ()
    assert all(".celeryev/" in channel for channel in (*WORKER.channels, *FLOWER.channels))


def test_flower_reads_neither_jobs_nor_the_queue() -> None:
    assert all("celeryev" in pattern for pattern in FLOWER.key_patterns)
