"""Keeps in Redis who is alive and which model each worker serves, and tells which model a name means."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

import redis
from pydantic import BaseModel, ConfigDict

from settings import SettingsError
from worker.lines.request_line import ANY_MODEL, names_model
from worker.registry.exchange import Command, RedisReply, Scripts, ask, ask_one, text, text_fields
from worker.registry.keys import Keys
from worker.schemas import WorkerInfo

TTL_S = 30  # of a heartbeat, and of an announcement, which goes with it
KNOWN_S = 7 * 24 * 3600  # a job may wait for a model whose workers are away for a weekend


class Announcement(BaseModel):
    """What a worker serves; fields of newer versions are left out."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    aliases: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    context_tokens: int = 0  # the most that one request may have
    fingerprint: str = ""  # of the checkpoint, see engine.checkpoint.files.fingerprint; "": of no files

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that is its own."""
        return (self.name, *(alias for alias in self.aliases if alias != ANY_MODEL))


class ServedModels:
    """The models that workers serve at a moment, and the names of those that may be waited for."""

    def __init__(self, announcements: Iterable[Announcement], known: Iterable[str] = ()) -> None:
        """`known`: names that mean a model, though nobody may serve it at the moment."""
        # Workers of one model may have different aliases, while they are changed.
        self._served = sorted(announcements, key=lambda served: served.name)
        self._names = {name: served.name for served in self._served for name in served.names}
        self._known = frozenset(known) - self._names.keys()
        self._any = next((served.name for served in self._served if ANY_MODEL in served.aliases), None)

    @classmethod
    def questions(cls, keys: Keys) -> Sequence[Command]:
        """What to ask Redis for `of_answers`."""
        return [("HGETALL", keys.served), ("TIME",)]

    @classmethod
    def of_answers(
        cls, answers: Sequence[RedisReply], known: Iterable[str] = (), ours: Announcement | None = None
    ) -> Self:
        """The models of Redis's answers to `questions`, and what is served here, whatever Redis has forgotten."""
        served, (now_s, _) = answers
        live = [] if ours is None else [ours]
        for entry in text_fields(served).values():
            ends_ms, _, announcement = entry.partition(" ")
            if int(ends_ms) > int(now_s) * 1000:
                live.append(Announcement.model_validate_json(announcement))
        return cls(live, known)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that mean a served model, each model's own before its aliases."""
        return tuple(self._names)

    def is_served(self, model: str) -> bool:
        """Whether a worker runs shards of `model`, a name that `resolve` gave."""
        return model in self._names

    def resolve(self, name: str) -> str | None:
        """The model that a line or job means by `name`: a served one's own name, or one to wait for. None: no model.

        A name that somebody has goes before the part of a hub name behind the slash, and both before the alias `*`.
        """
        if name in self._names or name in self._known:
            return self._names.get(name, name)
        for other in (*self._names, *sorted(self._known)):
            if names_model(name, other):
                return self._names.get(other, other)
        return self._any

    def of_endpoint(self, endpoint: str) -> tuple[str, ...]:
        """Which a request that names no model may mean: those that serve `endpoint`; where none does, all of them."""
        able = dict.fromkeys(served.name for served in self._served if endpoint in served.endpoints)
        return tuple(able or dict.fromkeys(served.name for served in self._served))


class ModelDirectory:
    """Writes and reads the announcements. Methods raise redis.RedisError when Redis cannot be had."""

    def __init__(self, client: redis.Redis, keys: Keys, *, worker_id: str, known: Sequence[str] = ()) -> None:
        """`known`: names of models that jobs may wait for, see limits.models."""
        self.client = client
        self._keys = keys
        self._worker_id = worker_id
        self._known = known
        self._ours: Announcement | None = None  # as announced

    @property
    def own_names(self) -> tuple[str, ...]:
        """The names of what this worker has announced."""
        return () if self._ours is None else self._ours.names

    def check(self, announcement: Announcement) -> None:
        """Raise SettingsError if another model has one of these names, see `announce`; says nothing."""
        self._announce(announcement, only_check=True)

    def announce(self, announcement: Announcement) -> None:
        """Say for TTL_S that this worker serves the model.

        Raises SettingsError where another worker serves another checkpoint under its name, or another model under one
        of its names: lines that give the name would be answered now by one, now by the other.
        """
        self._announce(announcement, only_check=False)
        self._ours = announcement

    def renew(self) -> None:
        """Say again what was announced, if anything was. Raises what `announce` raises."""
        if self._ours is not None:
            self._announce(self._ours, only_check=False)

    def forget(self) -> None:
        """Say that this worker serves nothing any more."""
        self._ours = None
        self.client.hdel(self._keys.served, self._worker_id)

    def read(self) -> ServedModels:
        """What is served now."""
        *answers, known = ask(
            self.client, [*ServedModels.questions(self._keys), ("ZRANGE", self._keys.known_models, 0, -1)]
        )
        return ServedModels.of_answers(answers, {*self._known, *map(text, known)}, self._ours)

    def _announce(self, announcement: Announcement, *, only_check: bool) -> None:
        call = Scripts.ANNOUNCE(
            self._keys.of_queue_scripts(),
            worker=self._worker_id,
            announcement=announcement.model_dump_json(),
            ttl_ms=TTL_S * 1000,
            known_ms=KNOWN_S * 1000,
            only_check=int(only_check),
        )
        status, *conflict = map(text, ask_one(self.client, call))
        if status != "ok":
            raise _refusal(announcement, status, *conflict)


class Heartbeats:
    """Says that a worker is there and serves what it announced. Methods raise redis.RedisError."""

    def __init__(self, directory: ModelDirectory, keys: Keys) -> None:
        self._directory = directory
        self._keys = keys

    def beat(self, info: WorkerInfo) -> None:
        """Say it for TTL_S. Raises SettingsError if another model has taken a name meanwhile, see `announce`."""
        key = f"{self._keys.workers}{info.id}"
        with self._directory.client.pipeline(transaction=True) as pipeline:
            fields = info.model_dump(exclude={"id"})
            pipeline.hset(key, mapping={name: str(value) for name, value in fields.items()})
            pipeline.expire(key, TTL_S)
            pipeline.execute()
        self._directory.renew()

    def forget(self, worker_id: str) -> None:
        """Say that it is gone."""
        self._directory.forget()
        self._directory.client.delete(f"{self._keys.workers}{worker_id}")


def _refusal(ours: Announcement, status: str, worker_id: str, model: str, name: str) -> SettingsError:
    key = "model.name" if name == ours.name else "model.aliases"
    if status == "checkpoint":
        problem = f"worker {worker_id} serves another checkpoint under this name"
        accepted = "the same files, or another model.name"
    else:
        problem = f"it means model {model!r} of worker {worker_id}"
        accepted = "a name that means no other model of this Redis"
    return SettingsError(key, name, problem, accepted=accepted)
