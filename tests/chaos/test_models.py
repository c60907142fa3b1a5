"""Workers of several models on one Redis: each line is answered by the model that it means, whatever happens to them.

Two models differ in all of their answers: a fake engine's salt is its model's name.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
import redis

from tests.chaos.fleet import Fleet, FleetWorker, running_fleet
from tests.chaos.jobs import (
    Record,
    check_invariants,
    check_nothing_is_left,
    check_records,
    contents,
    prompts,
    undisturbed,
    wait_all,
)
from tests.chaos.worker_program import WorkerOptions
from tests.support.processes import wait_until
from tests.support.registry import TestRegistry, must_claim
from tests.support.tiny_checkpoint import make_checkpoint
from tests.support.workers import millrace
from worker.client import BatchClient
from worker.registry.keys import Keys, UnitRef
from worker.registry.leases import NewShard
from worker.registry.lifecycle import PutStatus
from worker.registry.queues import lanes_by_priority, queue_of
from worker.schemas import DEFAULT_PRIORITY, JobState

ALPHA, BETA, EMBED, LATER, ALIAS = "alpha", "beta", "embed", "later", "gpt-4o-mini"

# A request takes 8 steps of 5 ms, 8 requests at a time.
SLOW = WorkerOptions(engine={"steps_per_request": 8, "step_s": 0.005})
PATIENT = {"worker.lease_s": "30"}  # nothing is run twice

NUM_LINES = 24  # of a job; shards are of 10
START_S, END_S = 60.0, 90.0  # on a busy machine

NUM_BEFORE_GATE = 5
# What a gate then lets through: a tenant's four shards of ten, three others that follow them, and ten prompts more.
NUM_LET_THROUGH = 80

Turn = tuple[str | None, str | None]


@dataclass(frozen=True)
class MixedJob:
    """A job whose lines take turns: each with the name that it gives, and the model that it means, None for none."""

    turns: tuple[Turn, ...]
    model: str | None = None  # the job's
    text: str = "prompt"  # or "input": embeddings

    def lines(self, name: str) -> list[dict[str, str]]:
        """Its lines; `name`: what their ids begin with."""
        return [
            {"custom_id": f"{name}-{number}", self.text: f"{name}, {number}", **({"model": given} if given else {})}
            for number, (given, _) in self._numbered()
        ]

    def expected(self, name: str) -> dict[str, Record]:
        """The records of the lines that mean a model, each as that model alone would write it."""
        lines = self.lines(name)
        by_model = {model: undisturbed(lines, model) for model in self.models}
        meant = {f"{name}-{number}": model for number, (_, model) in self._numbered() if model is not None}
        return {custom_id: by_model[model][custom_id] for custom_id, model in meant.items()}

    @property
    def models(self) -> set[str]:
        """Those that its lines mean."""
        return {model for _, model in self.turns if model is not None}

    def _numbered(self) -> Iterator[tuple[int, Turn]]:
        return ((number, self.turns[number % len(self.turns)]) for number in range(NUM_LINES))


JOBS = {
    "named alpha": MixedJob(((ALPHA, ALPHA),)),
    "named beta": MixedJob(((BETA, BETA),)),
    "of a job for alpha": MixedJob(((None, ALPHA),), ALPHA),
    "of a job for beta": MixedJob(((None, BETA),), BETA),
    "of a job for a hub's beta": MixedJob(((None, BETA),), "hub/beta"),
    "of a job for an alias": MixedJob(((None, ALPHA), (ALPHA, ALPHA)), ALIAS),
    "with an alias": MixedJob(((ALIAS, ALPHA),)),
    "with an alias on a hub": MixedJob((("openai/gpt-4o-mini", ALPHA),)),
    "named as on a hub": MixedJob((("hub/alpha", ALPHA),)),
    "split in two": MixedJob(((ALPHA, ALPHA), (BETA, BETA))),
    "split by other names": MixedJob(((ALIAS, ALPHA), ("hub/beta", BETA), (ALPHA, ALPHA))),
    "half unknown": MixedJob(((ALPHA, ALPHA), ("nobody", None))),
    "half unnamed": MixedJob(((None, None), (BETA, BETA))),
    "embeddings of three": MixedJob(((ALPHA, ALPHA), (BETA, BETA), (EMBED, EMBED)), text="input"),
    "embeddings, named": MixedJob(((EMBED, EMBED),), text="input"),
    "embeddings, unnamed": MixedJob(((None, EMBED),), EMBED, text="input"),
}
WAITING = {
    "waits for a model": MixedJob(((None, LATER),), LATER),
    "half waits for a model": MixedJob(((LATER, LATER), (ALPHA, ALPHA))),
}
REFUSED = {  # and whose names the refusal says
    "unnamed": (MixedJob(((None, None),)), (ALPHA, BETA)),
    "unnamed embeddings": (MixedJob(((None, None),), text="input"), (ALPHA, BETA, EMBED)),
}


def _start(
    fleet: Fleet,
    model: str,
    *,
    gate: Path | None = None,
    die_at: str = "",
    aliases: str = "none",
    path: Path | None = None,
) -> FleetWorker:
    """A worker of this model. Until there is the gate that it was given, it answers a few prompts and no more."""
    engine: dict[str, object] = {"salt": model, "generates": model != EMBED}
    if gate is not None:
        engine |= {"gate": str(gate), "answers_before_gate": NUM_BEFORE_GATE}
    files = "none" if path is None else str(path)
    return fleet.start(die_at=die_at, engine=engine, model__name=model, model__aliases=aliases, model__path=files)


@contextmanager
def _two_gated_workers(redis_url: str, client: BatchClient, directory: Path) -> Iterator[tuple[Fleet, dict[str, Path]]]:
    """Workers of alpha and beta that are up, and their gates, still shut."""
    gates = {model: directory / f"gate of {model}" for model in (ALPHA, BETA)}
    with running_fleet(redis_url, directory, SLOW, PATIENT) as fleet:
        for model, gate in gates.items():
            _start(fleet, model, gate=gate)
        fleet.wait_up(client)
        yield fleet, gates


def _open(gate: Path, num_answers: int | None = None) -> None:
    """Let so many answers through, None: all; at once, since workers read the file all the time."""
    drawn = gate.with_suffix(".new")
    drawn.write_text("" if num_answers is None else str(num_answers))
    os.replace(drawn, gate)


def _submit(client: BatchClient, jobs: Mapping[str, MixedJob]) -> dict[str, str]:
    """The jobs' ids by their names."""
    return {name: client.submit(job.lines(name), model=job.model) for name, job in jobs.items()}


def _running(bare: redis.Redis, field: str) -> list[str]:
    """This field of each shard that is being run."""
    keys = bare.scan_iter(f"{Keys().prefix}j:*:s:[0-9]*")
    shards = [cast("list[bytes | None]", bare.hmget(key, "st", field)) for key in keys]
    return [value.decode() for state, value in shards if state == b"running" and value is not None]


def _check_mixed(client: BatchClient, bare: redis.Redis, name: str, job_id: str, job: MixedJob) -> None:
    """Check that each line has one record: that of the model it means, or none of that name was found."""
    status = client.status(job_id)
    assert (status.status, status.waiting_for) == (JobState.COMPLETED, ()), status
    assert status.model == (next(iter(job.models)) if len(job.models) == 1 else None)
    check_records(client, bare, job_id, num_prompts=NUM_LINES)
    found, expected = contents(client.results(job_id)), job.expected(name)
    failed = {custom_id: found.pop(custom_id) for custom_id in found.keys() - expected.keys()}
    assert found == expected
    assert len(found) + len(failed) == NUM_LINES
    assert status.request_counts.failed == len(failed)
    assert {record["response"]["body"]["error"]["code"] for record in failed.values()} <= {"model_not_found"}


def _check_refused(client: BatchClient, job_id: str, names: tuple[str, ...]) -> None:
    """Check that nothing of the job ran, and that it was told the names it may give."""
    status = client.status(job_id)
    assert (status.status, status.request_counts.total, list(client.results(job_id))) == (JobState.FAILED, 0, [])
    named = ", ".join(map(repr, names))
    message = f"no model is named, and {len(names)} are served; accepted: {named}, in the lines or as --model"
    assert [(error.code, error.message) for error in status.errors] == [("model_not_found", message)]


@pytest.mark.chaos
def test_each_line_is_answered_by_its_model_though_workers_are_killed(
    client: BatchClient, bare: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    gate, lane = tmp_path / "gate", lanes_by_priority(queue_of(LATER))[DEFAULT_PRIORITY]
    with running_fleet(redis_url, tmp_path, SLOW, {"limits.models": LATER}) as fleet:
        alpha, beta = _start(fleet, ALPHA, gate=gate, aliases=ALIAS), _start(fleet, BETA, gate=gate)
        killed = [alpha, beta, _start(fleet, EMBED, die_at="after claim")]
        fleet.wait_up(client)
        refused = _submit(client, {name: job for name, (job, _) in REFUSED.items()})
        waiting = _submit(client, WAITING)
        wait_until(lambda: bare.llen(lane) == 5)  # three shards of one job and two of the other
        ids = _submit(client, JOBS)
        wait_until(lambda: {ALPHA, BETA} <= set(_running(bare, "model")))
        alpha.kill()
        beta.kill()
        wait_until(lambda: [worker.num_lives for worker in killed] == [2, 2, 2], timeout_s=START_S)
        _open(gate)
        for job_id in (*refused.values(), *ids.values()):
            client.wait(job_id, END_S)
        of_others = [0, NUM_LINES // 2]
        wait_until(lambda: [client.status(job).request_counts.finished for job in waiting.values()] == of_others)
        assert [client.status(job).waiting_for for job in waiting.values()] == [(LATER,)] * 2
        _start(fleet, LATER)
        for job_id in waiting.values():
            client.wait(job_id, END_S)
        for name, (_, names) in REFUSED.items():
            _check_refused(client, refused[name], names)
        for name, job in {**JOBS, **WAITING}.items():
            _check_mixed(client, bare, name, {**ids, **waiting}[name], job)
        check_nothing_is_left(bare)
        assert [worker.exit_codes for worker in killed] == [[-9]] * 3
        assert fleet.stop() == [0, 0, 0, 0]


def test_neither_another_tenant_nor_another_model_keeps_a_few_waiting(
    client: BatchClient, bare: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    with _two_gated_workers(redis_url, client, tmp_path) as (fleet, gates):
        lines = {name: prompts(count, of=name) for name, count in (("many", 200), ("flood", 200), ("few", 10))}
        many = client.submit(lines["many"], tenant="many", model=ALPHA)
        flood = client.submit(lines["flood"], tenant="few", model=BETA)
        # Both workers are full, and 16 shards more wait for each.
        wait_until(lambda: sorted(_running(bare, "model")) == [ALPHA] * 4 + [BETA] * 4)
        few = client.submit(lines["few"], tenant="few", model=ALPHA)
        wait_until(lambda: client.status(few).shards_total == 1)
        _open(gates[ALPHA], NUM_LET_THROUGH)
        client.wait(few, END_S)
        assert client.status(few).request_counts.completed == 10
        assert client.status(many).request_counts.finished <= NUM_BEFORE_GATE + NUM_LET_THROUGH - 10
        assert client.status(flood).request_counts.finished <= NUM_BEFORE_GATE
        for gate in gates.values():
            _open(gate)
        expected = {
            many: undisturbed(lines["many"], ALPHA),
            flood: undisturbed(lines["flood"], BETA),
            few: undisturbed(lines["few"], ALPHA),
        }
        wait_all(client, expected)
        check_invariants(client, bare, expected)
        assert fleet.stop() == [0, 0]


def test_shards_of_no_model_are_run_by_workers_of_any(
    client: BatchClient, bare: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    """As the version before planned them, which knew no models."""
    lines, registry = prompts(120), TestRegistry.at(redis_url)
    job_id, leases = client.submit(lines), registry.leases()
    shards = [NewShard(range(start, start + 10)) for start in range(0, 120, 10)]
    assert leases.planned(must_claim(leases, UnitRef.plan(job_id)), shards, ageing_s=60.0) is PutStatus.UNIT_DONE
    bare.hset(Keys().job(job_id), "v", 1)
    registry.make_due()  # nobody has announced them
    assert bare.zcard(f"{Keys().queued}:default") == len(shards)
    with _two_gated_workers(redis_url, client, tmp_path) as (fleet, gates):
        wait_until(lambda: len(set(_running(bare, "own"))) == 2)
        assert client.status(job_id).waiting_for == ()
        for gate in gates.values():
            _open(gate)
        wait_all(client, {job_id: {}})
        check_records(client, bare, job_id, num_prompts=120)
        by_model = {model: undisturbed(lines, model) for model in gates}
        found = contents(client.results(job_id))
        models = {custom_id: record["response"]["body"]["model"] for custom_id, record in found.items()}
        assert found == {custom_id: by_model[model][custom_id] for custom_id, model in models.items()}
        assert set(models.values()) == {ALPHA, BETA}
        check_nothing_is_left(bare)
        assert fleet.stop() == [0, 0]


def test_a_worker_whose_names_mean_another_model_does_not_start(
    client: BatchClient, fleet: Fleet, redis_url: str, tmp_path: Path, tiny_model: Path
) -> None:
    same, other = shutil.copytree(tiny_model, tmp_path / "same"), make_checkpoint(tmp_path / "other", seed=1)
    for path in (tiny_model, same):
        _start(fleet, ALPHA, aliases=ALIAS, path=path)
    fleet.wait_up(client)
    for path, names, problem in (
        (
            other,
            {"name": ALPHA},
            f"model.name={ALPHA}: worker WORKER, up or dead for less than 30 s, serves another checkpoint",
        ),
        (other, {"name": ALIAS}, f"model.name={ALIAS}: it means model 'alpha' of worker WORKER"),
        (same, {"name": BETA, "aliases": ALPHA}, f"model.aliases={ALPHA}: it means model 'alpha' of worker WORKER"),
        (
            same,
            {"name": BETA, "aliases": f"x,{ALIAS}"},
            f"model.aliases={ALIAS}: it means model 'alpha' of worker WORKER",
        ),
    ):
        named = [word for name, value in names.items() for word in ("--set", f"model.{name}={value}")]
        refused = millrace("worker", "--model", path, "--redis-url", redis_url, *named)
        messages = [problem.replace("WORKER", worker.id) for worker in client.workers()]
        assert refused.returncode == 2
        assert any(f"millrace: {message}" in refused.stderr.decode() for message in messages), refused
    job_id = client.submit(prompts(20))
    assert client.wait(job_id, END_S).model == ALPHA
    assert contents(client.results(job_id)) == undisturbed(prompts(20), ALPHA)
    assert (len(client.workers()), fleet.stop()) == (2, [0, 0])
