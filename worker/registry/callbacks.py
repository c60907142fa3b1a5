"""Whom to tell that a job has ended, and the outbox in Redis from which that is sent.

The script that closes a job makes its event, so there is one exactly if the job has ended. Whoever sends an event
takes it for a lease, with a token; an event whose sender died is taken again. So it is sent at least once, each time
under the same id.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Self
from urllib.parse import urlsplit

import redis

from settings import LimitSettings
from worker.registry.errors import CallbackUnknown, InvalidOption
from worker.registry.exchange import RedisReply, Untyped, ask, ask_one, text, text_fields
from worker.registry.keys import Keys
from worker.registry.lua import Scripts
from worker.schemas import ON_DONE_PATTERN

OPTION = "on_done"

DEAD_KEPT_MS = 604_800_000  # a week
MAX_ERROR = 200  # characters
_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"[a-z0-9._-]{1,253}|[0-9a-f:.]{2,45}")
_TASK = "task:"
# Whose messages workers take themselves.
_OWN_QUEUE = re.compile(r"millrace(\..*)?")

logger = logging.getLogger(__name__)


class CallbackKind(StrEnum):
    """How an event is sent; each has a queue of its own, as not everybody may send both."""

    URL = "url"
    TASK = "task"


@dataclass(frozen=True, slots=True)
class CallbackTarget:
    """A job's `on_done`, taken apart and found to be allowed."""

    kind: CallbackKind
    host: str = ""  # of a URL
    port: int = 0
    path: str = ""  # with its query
    is_tls: bool = False
    may_be_private: bool = False  # whether the host may have an address of a private network
    task: str = ""
    queue: str = ""

    @classmethod
    def checked(cls, on_done: str, limits: LimitSettings) -> Self:
        """The target that `on_done` names. Raises InvalidOption where it is none, or `limits` do not allow it."""
        if on_done.startswith(_TASK):
            return cls._of_task(on_done, limits)
        return cls._of_url(on_done, limits)

    @classmethod
    def _of_task(cls, on_done: str, limits: LimitSettings) -> Self:
        task, at, queue = on_done.removeprefix(_TASK).partition("@")
        if not (task and at and queue):
            raise _refusal("names no task", "task:NAME@QUEUE")
        if queue not in limits.callback_queue_names or _OWN_QUEUE.fullmatch(queue):
            raise _refusal(f"names the queue {queue}", "a queue of limits.callback_queues, none of Millrace's own")
        return cls(CallbackKind.TASK, task=task, queue=queue)

    @classmethod
    def _of_url(cls, url: str, limits: LimitSettings) -> Self:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
        except (ValueError, KeyError):
            raise _refusal("is no URL", "https://HOST[:PORT]/PATH") from None
        is_plain = re.fullmatch(r"[!-~]+", url) and "\\" not in url and "@" not in parts.netloc and not parts.fragment
        if not is_plain or _HOST.fullmatch(host) is None:
            raise _refusal("is no URL of a callback", "https://HOST[:PORT]/PATH, without user, password and fragment")
        shown = f"[{host}]" if ":" in host else host
        names = {f"{shown}:{port}"} | ({shown} if port == _PORTS[parts.scheme] else set())
        is_private = _is_listed(names, limits.callback_private_host_names)
        if not is_private and not _is_listed(names, limits.callback_host_names):
            raise _refusal(f"names the host {shown}:{port}", "a host of limits.callback_hosts")
        if parts.scheme == "http" and not is_private:
            raise _refusal("is not encrypted", "https://, or a host of limits.callback_private_hosts")
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return cls(CallbackKind.URL, host, port, path, parts.scheme == "https", may_be_private=is_private)


def allowed_target(on_done: object, limits: LimitSettings) -> str:
    """`on_done` if it is one that `limits` allow; "" for anything else."""
    try:
        if isinstance(on_done, str) and len(on_done) <= 512 and re.fullmatch(ON_DONE_PATTERN, on_done):
            CallbackTarget.checked(on_done, limits)
            return on_done
    except InvalidOption:
        pass
    return ""


def _is_listed(names: set[str], listed: Sequence[str]) -> bool:
    """Whether one of a host's names is listed; `*.example.com` lists every name below example.com."""
    return any(
        name == entry or (entry.startswith("*.") and name.endswith(entry[1:]))
        for entry in map(str.lower, listed)
        for name in names
    )


def _refusal(problem: str, accepted: str) -> InvalidOption:
    return InvalidOption(OPTION, problem, accepted=accepted)


@dataclass(frozen=True, slots=True)
class CallbackEvent:
    """That a job has ended, and for whom."""

    id: str
    job_id: str
    target: str  # the job's on_done
    tenant: str
    state: str  # completed, failed, expired or cancelled
    created_at: int  # Unix seconds, of the job's end
    counts: Mapping[str, int]  # of its prompts, as OpenAI's batch object has them
    tries: int
    error: str  # of the last try; "": none has failed
    due_at: float = 0.0  # Unix seconds: when it is sent next; of a dead one when it was given up
    is_dead: bool = False

    @classmethod
    def of(cls, event_id: str, entry: Mapping[str, str], due_ms: float = 0.0, *, is_dead: bool = False) -> Self:
        """The event of an entry in Redis."""
        ended = {"done": "completed"}.get(entry["state"], entry["state"])
        return cls(
            id=event_id,
            job_id=entry["job"],
            target=entry["to"],
            tenant=entry["tenant"],
            state=ended,
            created_at=int(entry["at"]) // 1000,
            counts={"total": int(entry["n"]), "completed": int(entry["ok"]), "failed": int(entry["err"])},
            tries=int(entry["tries"]),
            error=entry["error"],
            due_at=due_ms / 1000,
            is_dead=is_dead,
        )

    @property
    def kind(self) -> CallbackKind:
        """How it is sent."""
        return CallbackKind.TASK if self.target.startswith(_TASK) else CallbackKind.URL

    @property
    def message(self) -> dict[str, object]:
        """What is sent: OpenAI's webhook event, with the counts beside the job's id."""
        return {
            "id": self.id,
            "object": "event",
            "created_at": self.created_at,
            "type": f"batch.{self.state}",
            "data": {"id": self.job_id, "request_counts": dict(self.counts)},
        }

    @property
    def body(self) -> bytes:
        """The message as JSON, the same bytes at every try."""
        return json.dumps(self.message, separators=(",", ":")).encode("ascii")


@dataclass(frozen=True, slots=True)
class TakenCallback:
    """An event that is this sender's to send, until its lease has run out."""

    event: CallbackEvent
    token: str


class CallbackOutbox:
    """The events that are to be sent. Methods raise redis.RedisError when Redis cannot be had."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    def take(
        self, kind: CallbackKind, *, lease_s: float, longest_wait_s: float, but_of: Sequence[str] = ()
    ) -> TakenCallback | None:
        """The event of this kind that has been due for longest, one try of it counted; None: none is due.

        Those of the tenants `but_of` are passed over, at most 1000 of them.
        """
        call = Scripts.TAKE_CALLBACK(
            {"callbacks": self._waiting(kind)},
            [(tenant,) for tenant in but_of],
            prefix=self._keys.prefix,
            nonce=secrets.token_hex(8),
            lease_ms=round(lease_s * 1000),
            longest_ms=round(longest_wait_s * 1000),
        )
        while reply := ask_one(self._client, call):
            event_id, token, fields = reply
            try:
                event = self._event(event_id, dict(zip(fields[::2], fields[1::2], strict=True)))
            except (KeyError, ValueError):
                logger.exception("%r is no callback: nobody sends it", event_id)
                self._client.zrem(self._waiting(kind), event_id)
            else:
                return TakenCallback(event, text(token))
        return None

    def settle(self, taken: TakenCallback, error: str = "", *, wait_s: float | None = None) -> bool:
        """Note that the event was sent or, with an `error`, that it waits `wait_s` for its next try; None: it is dead.

        False, and nothing is noted, if another sender has taken it meanwhile.
        """
        keys = {"callbacks": self._waiting(taken.event.kind), "dead_callbacks": f"{self._keys.callbacks}dead"}
        call = Scripts.SETTLE_CALLBACK(
            {**keys, "counters": self._keys.counters},
            prefix=self._keys.prefix,
            event_id=taken.event.id,
            token=taken.token,
            error=error[:MAX_ERROR],
            wait_ms=-1 if wait_s is None else round(wait_s * 1000),
            keep_ms=DEAD_KEPT_MS,
        )
        return text(ask_one(self._client, call)) != "fenced"

    def events(self, limit: int, *, only_dead: bool = False) -> list[CallbackEvent]:
        """Those that wait, the next to be sent first, then the dead ones, the newest first; at most `limit` of each."""
        sets = [] if only_dead else [self._waiting(kind) for kind in CallbackKind]
        found: list[CallbackEvent] = []
        for key in sets:
            found += self._read([("ZRANGE", key, 0, limit - 1, "WITHSCORES")], is_dead=False)
        found.sort(key=lambda event: event.due_at)
        dead = self._read([("ZREVRANGE", f"{self._keys.callbacks}dead", 0, limit - 1, "WITHSCORES")], is_dead=True)
        return found[:limit] + dead

    def _event(
        self, event_id: bytes | str, entry: Mapping[Untyped, Untyped], due_ms: float = 0.0, *, is_dead: bool = False
    ) -> CallbackEvent:
        """The event of what is found in Redis. Raises KeyError or ValueError where that is none."""
        checked_id = text(event_id)
        self._keys.callback(checked_id)
        return CallbackEvent.of(checked_id, text_fields(entry), due_ms, is_dead=is_dead)

    def _read(self, question: Sequence[Sequence[str | int]], *, is_dead: bool) -> list[CallbackEvent]:
        """Those of a set; none for a member that is no event, that was sent meanwhile, or that is forgotten."""
        [members] = ask(self._client, question)
        found = []
        with self._client.pipeline(transaction=False) as pipeline:
            rows = _scores(members)
            for event_id, _ in rows:
                pipeline.hgetall(f"{self._keys.callbacks}e:".encode() + event_id)
            entries = pipeline.execute(raise_on_error=False)
        for (event_id, due_ms), entry in zip(rows, entries, strict=True):
            if isinstance(entry, Exception) and "WRONGTYPE" not in str(entry):
                raise entry
            with suppress(KeyError, ValueError):
                if entry and not isinstance(entry, Exception):
                    found.append(self._event(event_id, entry, due_ms, is_dead=is_dead))
        return found

    def retry(self, event_id: str) -> None:
        """Have an event sent now, with all of its tries before it. Raises CallbackUnknown."""
        self._change(event_id, "retry")

    def drop(self, event_id: str) -> None:
        """Forget an event. Raises CallbackUnknown."""
        self._change(event_id, "drop")

    def _change(self, event_id: str, action: Literal["retry", "drop"]) -> None:
        try:
            self._keys.callback(event_id)
        except ValueError as error:
            raise CallbackUnknown(event_id) from error
        sets = {f"callback_{kind}s": self._waiting(kind) for kind in CallbackKind}
        keys = {**sets, "dead_callbacks": f"{self._keys.callbacks}dead"}
        call = Scripts.CHANGE_CALLBACK(keys, prefix=self._keys.prefix, event_id=event_id, action=action)
        if not ask_one(self._client, call):
            raise CallbackUnknown(event_id)

    def _waiting(self, kind: CallbackKind) -> str:
        return f"{self._keys.callbacks}{kind}"


def _scores(members: RedisReply) -> list[tuple[bytes, float]]:
    """Members and scores as Redis answers them, in pairs or flat."""
    is_paired = bool(members) and isinstance(members[0], (list, tuple))
    pairs = members if is_paired else zip(members[::2], members[1::2], strict=True)
    return [(member.encode() if isinstance(member, str) else member, float(score)) for member, score in pairs]
