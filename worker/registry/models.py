"""Keeps in Redis who is alive and which model each worker serves, and tells which model a name means."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Self

import redis
from pydantic import BaseModel, ConfigDict, ValidationError

from settings import SettingsError
from worker.lines.request_line import ANY_MODEL, names_model
from worker.registry.exchange import Command, RedisReply, Untyped, ask, ask_one, text, text_fields
from worker.registry.keys import Keys
from worker.registry.lua import Scripts
from worker.schemas import WorkerInfo

TTL_S = 30  # of a heartbeat, and of an announcement, which goes with it
BEAT_S = 10.0  # the longest time between two
SETTLE_S = BEAT_S + 2.0
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
    """The models that workers serve at a moment, and those that may be waited for."""

    def __init__(
        self, served: Iterable[Announcement], away: Iterable[Announcement] = (), known: Iterable[str] = ()
    ) -> None:
        """`away`: what was served lately; `known`: names of limits.models. Jobs may wait for either."""
        # Workers of one model may have different aliases, while they are changed.
        self._served = sorted(served, key=lambda model: model.name)
        own = {model.name for model in self._served}
        self._away = sorted((model for model in away if model.name not in own), key=lambda model: model.name)
        self._names = {name: model.name for model in self._served for name in model.names}
        self._waited_for = {name: name for name in known}
        self._waited_for |= {name: model.name for model in self._away for name in model.names}

    @classmethod
    def questions(cls, keys: Keys) -> Sequence[Command]:
        """What to ask Redis for `of_answers`."""
        return [("HGETALL", keys.served), ("HGETALL", keys.known_models), ("TIME",)]

    @classmethod
    def of_answers(
        cls, answers: Sequence[RedisReply], known: Iterable[str] = (), ours: Announcement | None = None
    ) -> Self:
        """The models of Redis's answers to `questions`, and what is served here, whatever Redis has forgotten."""
        served, away, (now_s, _) = answers
        live = [*_live(served, int(now_s) * 1000), *([] if ours is None else [ours])]
        return cls(live, _live(away, int(now_s) * 1000), known)

    @property
    def is_any_served(self) -> bool:
        """Whether a worker is up."""
        return bool(self._served)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that mean a served model, each model's own before its aliases."""
        return tuple(self._names)

    @property
    def lately_served(self) -> tuple[str, ...]:
        """The own names of the models that are served, or were within a week."""
        return tuple(sorted({model.name for model in (*self._served, *self._away)}))

    @property
    def contexts(self) -> Mapping[str, Sequence[int]]:
        """By served model: the contexts of its workers in tokens, each once, the smallest first."""
        found: dict[str, set[int]] = {}
        for model in self._served:
            found.setdefault(model.name, set()).add(model.context_tokens)
        return {name: sorted(contexts) for name, contexts in found.items()}

    def is_served(self, model: str) -> bool:
        """Whether a worker runs shards of `model`, a name that `resolve` gave."""
        return model in self._names

    def resolve(self, name: str) -> str | None:
        """The model that a line or job means by `name`: its own name, served or to wait for. None: no model.

        A served model's name goes before one to wait for, a whole name before the part of a hub name behind the slash,
        and all of these before the alias `*`.
        """
        for names in (self._names, self._waited_for):
            if name in names:
                return names[name]
            for other, model in names.items():
                if names_model(name, other):
                    return model
        return next((model.name for model in (*self._served, *self._away) if ANY_MODEL in model.aliases), None)

    def of_endpoint(self, endpoint: str) -> tuple[str, ...]:
        """Which a request that names no model may mean.

        Those that serve `endpoint`; where none does, those that did lately; where there are none either, all.
        """
        for models in (self._served, self._away):
            able = tuple(dict.fromkeys(model.name for model in models if endpoint in model.endpoints))
            if able:
                return able
        return tuple(dict.fromkeys(model.name for model in self._served))


def _live(entries: Mapping[Untyped, Untyped], now_ms: int) -> list[Announcement]:
    """What has not run out, less what another version wrote that this one cannot read."""
    found = []
    for entry in text_fields(entries).values():
        ends_ms, _, announcement = entry.partition(" ")
        if int(ends_ms) > now_ms:
            with suppress(ValidationError):
                found.append(Announcement.model_validate_json(announcement))
    return found


class ModelDirectory:
    """Writes and reads the announcements. Methods raise redis.RedisError when Redis cannot be had."""

    def __init__(self, client: redis.Redis, keys: Keys, *, worker_id: str, known: Sequence[str] = ()) -> None:
        """`known`: names of models that jobs may wait for, see limits.models."""
        self.client = client
        self._keys = keys
        self._worker_id = worker_id
        self._known = known
        self._ours: Announcement | None = None  # as announced
        self._settled_at = float("-inf")

    @property
    def own_names(self) -> tuple[str, ...]:
        """The names of what this worker has announced."""
        return () if self._ours is None else self._ours.names

    def check(self, announcement: Announcement) -> None:
        """Raise SettingsError if another model has one of these names, see `announce`; else jobs may wait for them."""
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
        if self._ours is not None and not self._announce(self._ours, only_check=False):
            # Redis has forgotten it, and then what others said too: they say it again with their next heartbeats.
            self._settled_at = time.monotonic() + SETTLE_S

    def forget(self) -> None:
        """Say that this worker serves nothing any more."""
        self._ours = None
        self.client.hdel(self._keys.served, self._worker_id)

    def read(self) -> ServedModels:
        """What is served now."""
        return ServedModels.of_answers(
            ask(self.client, ServedModels.questions(self._keys)), sorted(self._known), self._ours
        )

    def unsettled_s(self) -> float:
        """For how long not to trust what is read, as Redis has forgotten it and not all workers have said it again."""
        if self._ours is not None and not self.client.hexists(self._keys.served, self._worker_id):
            self.renew()
        return max(self._settled_at - time.monotonic(), 0.0)

    def _announce(self, announcement: Announcement, *, only_check: bool) -> bool:
        """Whether it was said before."""
        call = Scripts.ANNOUNCE(
            self._keys.of_queue_scripts(),
            worker=self._worker_id,
            announcement=announcement.model_dump_json(),
            ttl_ms=TTL_S * 1000,
            known_ms=KNOWN_S * 1000,
            only_check=int(only_check),
        )
        status, *rest = map(text, ask_one(self.client, call))
        if status != "ok":
            raise _refusal(announcement, status, *rest)
        return rest == ["1"]


class Heartbeats:
    """Says that a worker is there and serves what it announced. Methods raise redis.RedisError."""

    def __init__(self, directory: ModelDirectory, keys: Keys) -> None:
        self._directory = directory
        self._keys = keys

    def beat(self, info: WorkerInfo, *, is_well: bool = True) -> None:
        """Say it for TTL_S. Raises SettingsError if another model has taken a name meanwhile, see `announce`.

        A worker that is not well serves nothing: its leases run out, and then its units are to blame.
        """
        key = f"{self._keys.workers}{info.id}"
        with self._directory.client.pipeline(transaction=True) as pipeline:
            # Apart from the engine's figures: clients of a version before know no others.
            fields = info.model_dump(exclude={"id", "engine"})
            pipeline.hset(key, mapping={name: str(value) for name, value in fields.items()})
            pipeline.expire(key, TTL_S)
            if info.engine is not None:
                pipeline.set(f"{self._keys.engines}{info.id}", info.engine.model_dump_json(), ex=TTL_S)
            pipeline.execute()
        if is_well:
            self._directory.renew()

    def forget(self, worker_id: str) -> None:
        """Say that it is gone."""
        self._directory.forget()
        self._directory.client.delete(f"{self._keys.workers}{worker_id}", f"{self._keys.engines}{worker_id}")


def _refusal(ours: Announcement, status: str, worker_id: str, model: str, name: str) -> SettingsError:
    key = "model.name" if name == ours.name else "model.aliases"
    if status == "checkpoint":
        problem = f"worker {worker_id}, up or dead for less than {TTL_S} s, serves another checkpoint under this name"
        accepted = "the same files, or another model.name"
    else:
        problem = f"it means model {model!r} of worker {worker_id}"
        accepted = "a name that means no other model of this Redis"
    return SettingsError(key, name, problem, accepted=accepted)
