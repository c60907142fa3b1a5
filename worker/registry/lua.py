"""Declares the Lua scripts of scripts/: what each takes, and how Redis knows it, as a script or as a function.

From Redis 7.0 on the scripts are a library of functions, called by name: a user who may FCALL alone can run these and
no others. Before it, and where a user may not FCALL, they are sent as scripts and called by their digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property
from importlib import resources

from worker.registry import scripts

Argument = str | bytes | int | float
PlainCommand = Sequence[Argument]  # its name, then its arguments


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """A call of a script, which `ask` sends as this server takes it."""

    script: Script
    arguments: Sequence[Argument]  # number of keys, keys, and what else it takes


class CallsBy(Enum):
    """How a server is to call the scripts."""

    FUNCTION = "FCALL"
    SCRIPT = "EVALSHA"


_UNIT_KEYS = "job records order lines unit plan open counters dead resume_states queued"  # the order of prelude.lua


# Redis 6.2 to 8.2 looks at its memory before a script's first write alone, and refuses none that takes away.
_ALLOW_OOM = "redis.call('UNLINK', KEYS[1] .. ':none')\n"


class Script:
    """One of scripts/*.lua, with names for its KEYS and ARGV in the order in which it reads them.

    Redis knows it by a digest, so workers of two versions can share one, each with its own scripts.
    """

    def __init__(
        self,
        name: str,
        arguments: str = "",
        *,
        row: str = "",
        keys: str = _UNIT_KEYS,
        allow_oom: bool = False,
        is_reading: bool = False,
    ) -> None:
        """`allow_oom`: also where Redis has no memory left; for what makes room, or needs next to none.

        `is_reading`: it changes nothing.
        """
        self.name = name
        self.allow_oom = allow_oom
        self.is_reading = is_reading
        self.is_about_unit = keys == _UNIT_KEYS
        self.keys = keys.split()
        self.arguments = arguments.split()
        self.row = row.split()  # what follows the arguments, any number of times
        self.function = f"{name}{'_when_full' * allow_oom}"  # without the library's name, with which it begins

    def __call__(
        self, keys: Mapping[str, str], rows: Iterable[Sequence[Argument]] = (), **arguments: Argument
    ) -> ScriptCall:
        """The call of it, with those of `keys` that it takes. Raises TypeError for what it does not take."""
        if arguments.keys() != set(self.arguments):
            raise TypeError(f"{self.name}.lua is given {sorted(arguments)}; accepted: {self.arguments}")
        given: list[Argument] = [len(self.keys)]
        given += [keys[name] for name in self.keys]
        given += [arguments[name] for name in self.arguments]
        for row in rows:
            if len(row) != len(self.row):
                raise TypeError(f"{self.name}.lua is given a row of {len(row)}; accepted: {self.row}")
            given += row
        return ScriptCall(self, given)

    def called(self, calls_by: CallsBy) -> tuple[str, str]:
        """The command that calls it, and the name by which Redis knows it."""
        return ("EVALSHA", self.digest) if calls_by is CallsBy.SCRIPT else self._function

    @cached_property
    def source(self) -> str:
        """Its text as a script."""
        return f"{_ALLOW_OOM * self.allow_oom}{script_source('prelude')}{self.body}"

    @cached_property
    def body(self) -> str:
        """Its text behind the prelude's."""
        return f"{'use_keys(KEYS)' if self.is_about_unit else ''}\n{script_source(self.name)}"

    @cached_property
    def digest(self) -> str:
        """The SHA-1 of its text, by which Redis knows the script."""
        return _sha1(self.source)

    @cached_property
    def _function(self) -> tuple[str, str]:
        return "FCALL_RO" if self.is_reading else "FCALL", f"{library_name()}_{self.function}"


_SUBMIT_KEYS = "job lines plan open counters tenant_counters jobs staged"
_RECORD = "index outcome record prompt_tokens cached_tokens output_tokens resumed_tokens reasoning_tokens"


class Scripts:
    """Every script, with what it takes; its first comment says what the words mean."""

    # About a unit
    BEGIN_ALONE = Script("begin_alone", "job_id unit token")
    CANCEL = Script("cancel", "job_id", allow_oom=True)
    CLAIM = Script("claim", "job_id unit worker nonce lease_ms max_attempts alone models", allow_oom=True)
    FAIL = Script("fail", "job_id token reason errors", allow_oom=True)
    MEND = Script("mend", "job_id", allow_oom=True)
    PLANNED = Script("planned", "job_id token grace_ms ageing_ms endpoints model traceparent", row="indices head model")
    PUT = Script("put", "job_id unit token num_known", row=_RECORD)
    PUT_AT_END = Script("put", "job_id unit token num_known", row=_RECORD, allow_oom=True)
    PUT_RESUME_STATES = Script("put_resume_states", "job_id unit token", row="index state")
    RELEASE = Script("release", "job_id unit token grace_ms count_attempt", allow_oom=True)
    RENEW = Script("renew", "job_id unit token lease_ms num_known", allow_oom=True)
    SUSPECT = Script("suspect", is_reading=True)
    # About a job
    DELETE = Script("delete", "job_id", keys="job records order lines jobs counters", allow_oom=True)
    COPY_FILE = Script("copy_file", "staging_ms", keys="file_lines staged")
    DISCARD = Script("discard", keys="job lines", allow_oom=True)
    KEEP_FILE = Script(
        "keep_file",
        "file_id num_lines num_bytes about keep_ms max_files max_bytes",
        keys="staged file_lines files",
    )
    PAGE = Script("page", "order cursor last max_records max_bytes", keys="job records order", is_reading=True)
    REFUSE = Script(
        "refuse", "job_id reason errors tenant retain_ms staging_ms on_done", keys="job jobs staged counters"
    )
    STAGE = Script("stage", "staging_ms", row="index line", keys="job staged")
    SUBMIT = Script("submit", "job", keys=_SUBMIT_KEYS)
    SUBMIT_ONCE = Script("submit", "job", keys=f"{_SUBMIT_KEYS} idempotency")
    # Only a job that is known, also where Redis has no memory left
    FIND = Script("submit", "job", keys=_SUBMIT_KEYS, allow_oom=True)
    FIND_ONCE = Script("submit", "job", keys=f"{_SUBMIT_KEYS} idempotency", allow_oom=True)
    # About all of them
    ACKNOWLEDGE = Script("acknowledge", "ack", keys="counters", allow_oom=True)
    CHANGE_CALLBACK = Script(
        "change_callback", "prefix event_id action", keys="callback_urls callback_tasks dead_callbacks", allow_oom=True
    )
    SETTLE_CALLBACK = Script(
        "settle_callback",
        "prefix event_id token error wait_ms keep_ms",
        keys="callbacks dead_callbacks counters",
        allow_oom=True,
    )
    TAKE_CALLBACK = Script(
        "take_callback", "prefix nonce lease_ms longest_ms", row="tenant", keys="callbacks", allow_oom=True
    )
    ANNOUNCE = Script("announce", "worker announcement ttl_ms known_ms only_check", keys="served known_models")
    CHOOSE = Script(
        "choose",
        "prefix only_new_tenants ageing_ms hint models",
        row="tenant num_prompts head",
        keys="unit queued job",
        allow_oom=True,
    )
    QUEUE_FIGURES = Script("queue", "prefix max_tenants max_shards", keys="open queued counters dead", is_reading=True)
    REAP = Script(
        "reap",
        "prefix max_units grace_ms longest_grace_ms stale_ms unserved_ms plan_priority ageing_ms steps patience_ms "
        "served_ttl_ms",
        row="model messages",  # of each model that is served, and of none: how many messages wait by lane's step, JSON
        keys="open served",
    )


def _scripts() -> Iterator[Script]:
    return (script for script in vars(Scripts).values() if isinstance(script, Script))


def script_source(name: str) -> str:
    """The text of one file of scripts/."""
    return resources.files(scripts).joinpath(f"{name}.lua").read_text(encoding="ascii")


_PROBE = "is_there"


@cache
def library_name() -> str:
    """The name of this version's functions, with which each of theirs begins: a digest of their text."""
    return f"millrace_{_sha1(_functions(''))[:16]}"


def call_of_nothing() -> PlainCommand:
    """Calls a function that does nothing: whether the library is there, and this user may FCALL."""
    return "FCALL_RO", f"{library_name()}_{_PROBE}", 0


@cache
def library() -> str:
    """The scripts as a library of functions, which FUNCTION LOAD takes."""
    return f"#!lua name={library_name()}\n{_functions(library_name())}"


def _functions(prefix: str) -> str:
    named = {script.function: script for script in _scripts()}  # one may be declared for several numbers of keys
    texts = [script_source("prelude"), _function(f"{prefix}_{_PROBE}", "return 1\n", "'no-writes'")]
    for name, script in named.items():
        flags = "'allow-oom'" * script.allow_oom or "'no-writes'" * script.is_reading
        texts.append(_function(f"{prefix}_{name}", script.body, flags))
    return "".join(texts)


def _function(name: str, body: str, flags: str) -> str:
    return (
        f"redis.register_function{{function_name = '{name}', flags = {{{flags}}}, callback = function(KEYS, ARGV) "
        f"{body}end}}\n"
    )


def _sha1(source: str) -> str:
    return hashlib.sha1(source.encode("ascii"), usedforsecurity=False).hexdigest()
