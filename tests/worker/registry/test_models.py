"""Which model a name means, who may announce one, and who may run its shards."""

from __future__ import annotations

import time

import pytest

from settings import SettingsError
from tests.support.registry import TestRegistry, must_claim, ok
from worker.registry.exchange import text
from worker.registry.keys import UnitRef
from worker.registry.leases import NewShard
from worker.registry.lifecycle import ClaimRefusal, PutStatus, RunMode
from worker.registry.models import BEAT_S, SETTLE_S, Announcement, Heartbeats, ServedModels
from worker.registry.queues import queue_of
from worker.schemas import SubmitOptions, WorkerInfo

CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"
QWEN = Announcement(name="Qwen3-0.6B", aliases=("gpt-4o-mini",), endpoints=(CHAT, EMBEDDINGS))
BERT = Announcement(name="bert", aliases=("*",), endpoints=(EMBEDDINGS,))
INFO = WorkerInfo(id="tester", version="1", model="m", steps=0, open_requests=0, held=0)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("Qwen3-0.6B", "Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B", "Qwen3-0.6B"),
        ("gpt-4o-mini", "Qwen3-0.6B"),
        ("openai/gpt-4o-mini", "Qwen3-0.6B"),
        ("later", "later"),
        ("hub/later", "later"),
        ("Qwen/whole", "Qwen/whole"),
        ("gpt-5", "llama"),
        ("hub/llama", "llama"),
        ("hub/Qwen3-0.6B", "Qwen3-0.6B"),
        ("whole", None),
        ("qwen3-0.6b", None),
        ("*", None),
        ("", None),
    ],
)
def test_a_name_means_a_served_model_or_one_to_wait_for(name: str, model: str | None) -> None:
    away = Announcement(name="llama", aliases=("gpt-5",))
    served = ServedModels([QWEN], [away, QWEN], known=["later", "Qwen/whole", "hub/Qwen3-0.6B"])
    assert served.resolve(name) == model


@pytest.mark.parametrize(
    "served", [ServedModels([QWEN, BERT], known=["later"]), ServedModels([QWEN], [BERT], ["later"])]
)
def test_any_other_name_means_the_model_that_takes_any(served: ServedModels) -> None:
    assert {name: served.resolve(name) for name in ("gpt-5", "later", "gpt-4o-mini", "hub/later")} == {
        "gpt-5": "bert",
        "later": "later",
        "gpt-4o-mini": "Qwen3-0.6B",
        "hub/later": "later",
    }


def test_no_name_means_the_only_model_that_serves_the_endpoint() -> None:
    served = ServedModels([QWEN, BERT])
    assert served.of_endpoint(CHAT) == ("Qwen3-0.6B",)
    assert served.of_endpoint(EMBEDDINGS) == ("Qwen3-0.6B", "bert")
    assert ServedModels([BERT], [QWEN]).of_endpoint(CHAT) == ("Qwen3-0.6B",)  # which may come back
    assert ServedModels([BERT]).of_endpoint(CHAT) == ("bert",)  # whose answer says what it serves


def test_an_announcement_is_read_by_all_until_it_is_taken_back(registry: TestRegistry) -> None:
    mine = registry.directory("a", known=["later"])
    mine.announce(QWEN)
    served = registry.directory("b").read()
    assert (served.names, served.resolve("later")) == (("Qwen3-0.6B", "gpt-4o-mini"), None)
    assert mine.read().resolve("later") == "later"
    mine.forget()
    gone = registry.directory("b").read()
    assert (gone.is_served("Qwen3-0.6B"), gone.resolve("gpt-4o-mini")) == (False, "Qwen3-0.6B")


def test_what_a_dead_worker_announced_is_no_longer_served(registry: TestRegistry) -> None:
    registry.directory("dead").announce(QWEN)
    key = registry.keys.served
    ended_ms = 1000 * (int(registry.time_s()) - 10)
    registry.redis.hset(key, "dead", f"{ended_ms} {QWEN.model_dump_json()}")
    assert registry.directory("b").read().names == ()
    registry.directory("b").announce(QWEN.model_copy(update={"fingerprint": "other"}))
    assert registry.redis.hkeys(key) == [b"b"]


def test_a_model_stays_known_for_a_week(registry: TestRegistry) -> None:
    registry.directory("a").announce(QWEN)
    entry = registry.redis.hget(registry.keys.known_models, "Qwen3-0.6B")
    assert entry is not None
    ends_s = float(text(entry).split()[0]) / 1000
    assert 7 * 24 * 3600 - 60 < ends_s - registry.time_s() <= 7 * 24 * 3600
    registry.redis.hset(registry.keys.known_models, "Qwen3-0.6B", f"1 {QWEN.model_dump_json()}")
    registry.directory("a").announce(BERT)
    assert registry.redis.hkeys(registry.keys.known_models) == [b"bert"]


def test_a_model_may_be_waited_for_while_it_is_loaded(registry: TestRegistry) -> None:
    registry.directory("a").check(QWEN)
    loading = registry.directory("b").read()
    assert (loading.is_served("Qwen3-0.6B"), loading.resolve("gpt-4o-mini")) == (False, "Qwen3-0.6B")


@pytest.mark.parametrize("entry", ["", "soon", "{}", '{"name": "x", "aliases": null}', '{"name": 7, "aliases": {}}'])
def test_what_another_version_announced_is_left_alone(registry: TestRegistry, entry: str) -> None:
    registry.redis.hset(registry.keys.served, "newer", f"9999999999999 {entry}")
    registry.redis.hset(registry.keys.known_models, "newer", f"9999999999999 {entry}")
    registry.directory("a").announce(QWEN)
    assert registry.directory("b").read().names == QWEN.names
    assert registry.redis.hexists(registry.keys.served, "newer")


def test_what_is_read_is_not_trusted_until_all_have_announced_again(
    registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = registry.directory("a")
    assert directory.unsettled_s() == 0  # it has announced nothing
    directory.announce(QWEN)
    assert directory.unsettled_s() == 0
    registry.redis.flushall()
    assert BEAT_S < directory.unsettled_s() <= SETTLE_S
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + SETTLE_S)
    assert directory.unsettled_s() == 0
    assert registry.directory("b").read().names == QWEN.names


@pytest.mark.parametrize("method", ["check", "announce"])
@pytest.mark.parametrize(
    ("ours", "message"),
    [
        (
            Announcement(name="Qwen3-0.6B", fingerprint="other"),
            "model.name=Qwen3-0.6B: worker a, up or dead for less than 30 s, serves another checkpoint under this "
            "name; accepted: the same files, or another model.name",
        ),
        (
            Announcement(name="gpt-4o-mini"),
            "model.name=gpt-4o-mini: it means model 'Qwen3-0.6B' of worker a; "
            "accepted: a name that means no other model of this Redis",
        ),
        (
            Announcement(name="bert", aliases=("x", "gpt-4o-mini")),
            "model.aliases=gpt-4o-mini: it means model 'Qwen3-0.6B' of worker a; "
            "accepted: a name that means no other model of this Redis",
        ),
    ],
)
def test_a_name_that_means_another_model_is_refused(
    registry: TestRegistry, method: str, ours: Announcement, message: str
) -> None:
    registry.directory("a").announce(QWEN)
    with pytest.raises(SettingsError) as refused:
        getattr(registry.directory("b"), method)(ours)
    assert str(refused.value) == message
    assert registry.redis.hkeys(registry.keys.served) == [b"a"]


def test_two_models_may_not_both_take_any_name(registry: TestRegistry) -> None:
    registry.directory("a").announce(BERT)
    with pytest.raises(SettingsError, match=r"model\.aliases=\*"):
        registry.directory("b").announce(QWEN.model_copy(update={"aliases": ("*",)}))


def test_workers_of_one_checkpoint_may_have_different_aliases(registry: TestRegistry) -> None:
    registry.directory("a").announce(QWEN)
    registry.directory("b").announce(Announcement(name="Qwen3-0.6B", aliases=("gpt-5",)))
    served = registry.directory("c").read()
    assert [served.resolve(name) for name in ("gpt-5", "gpt-4o-mini")] == ["Qwen3-0.6B"] * 2


def test_a_heartbeat_announces_again_to_a_redis_that_forgot(registry: TestRegistry) -> None:
    directory = registry.directory("tester")
    directory.announce(QWEN)
    registry.redis.flushall()
    assert directory.read().names == QWEN.names  # its own planner still knows
    heartbeats = Heartbeats(directory, registry.keys)
    heartbeats.beat(INFO)
    assert registry.directory("b").read().names == QWEN.names
    heartbeats.forget("tester")
    assert registry.directory("b").read().names == ()


def test_a_shard_is_claimed_by_workers_of_its_model_alone(registry: TestRegistry) -> None:
    shard = UnitRef.shard(registry.running_job([0], model="a"), 0)
    assert registry.leases(models=["b", "c"]).claim(shard) is ClaimRefusal.OTHER_MODEL
    assert registry.leases(models=[]).claim(shard) is ClaimRefusal.OTHER_MODEL
    assert must_claim(registry.leases(models=["b", "a"]), shard).model == "a"


def test_whoever_serves_nothing_may_close_the_shard_of_a_cancelled_job(registry: TestRegistry) -> None:
    shard = UnitRef.shard(registry.running_job([0], model="a"), 0)
    registry.control.cancel(shard.job_id)
    assert must_claim(registry.leases(models=[]), shard).mode is RunMode.CANCELLED


def test_a_worker_chooses_among_the_shards_of_its_model(registry: TestRegistry) -> None:
    of_a, of_b = (UnitRef.shard(registry.running_job([0], model=model), 0) for model in "ab")
    assert registry.shard_queue(models=["a"]).choose(of_b, [], only_new_tenants=False) == of_a
    assert registry.shard_queue(models=["b"]).choose(of_a, [], only_new_tenants=False) == of_b


def test_a_shard_that_an_older_version_planned_is_anybodys(registry: TestRegistry) -> None:
    job_id, leases = registry.submit([b"x"]), registry.leases()
    assert (
        leases.planned(must_claim(leases, UnitRef.plan(job_id)), [NewShard([0])], ageing_s=60.0) is PutStatus.UNIT_DONE
    )
    shard = UnitRef.shard(job_id, 0)
    assert registry.redis.zrange(f"{registry.keys.queued}:default", 0, -1) == [str(shard).encode()]
    other = UnitRef.shard(job_id, 7)
    assert registry.shard_queue(models=["a"]).choose(other, [], only_new_tenants=False) == shard
    assert must_claim(registry.leases(models=["a"]), shard).model == ""


def test_a_shard_is_announced_once_its_model_is_served(registry: TestRegistry) -> None:
    job_id = registry.running_job([0], model="a")
    registry.directory("worker-of-a").forget()
    registry.make_due()
    assert registry.reap_queue().due() == []
    score = registry.redis.zscore(registry.keys.open, f"{job_id}/0")
    assert score is not None
    assert 25 < score / 1000 - registry.time_s() <= 30
    registry.serve("a")
    registry.make_due()
    assert [(due.ref, due.model) for due in registry.reap_queue().due()] == [(UnitRef.shard(job_id, 0), "a")]


def test_a_shard_that_nobody_serves_expires_in_time(registry: TestRegistry) -> None:
    job_id = registry.running_job([0], model="a", options=SubmitOptions(deadline_s=5))
    registry.directory("worker-of-a").forget()
    registry.make_due()
    assert registry.reap_queue().due() == []
    score = registry.redis.zscore(registry.keys.open, f"{job_id}/0")
    assert score is not None
    assert score / 1000 - registry.time_s() <= 5
    registry.expire(job_id)
    registry.make_due()
    assert [due.should_close for due in registry.reap_queue().due()] == [True]


def test_a_job_waits_for_models_of_its_shards_that_nobody_serves(registry: TestRegistry) -> None:
    job_id, leases = registry.submit([b"x"] * 3), registry.leases(models=["a"])
    shards = [NewShard([0], model="a"), NewShard([1], model="b"), NewShard([2], model="c")]
    assert leases.planned(must_claim(leases, UnitRef.plan(job_id)), shards, ageing_s=60.0) is PutStatus.UNIT_DONE
    assert registry.status(job_id).waiting_for == ("a", "b", "c")
    registry.serve("b")
    assert registry.status(job_id).waiting_for == ("a", "c")
    leases.put(must_claim(leases, UnitRef.shard(job_id, 0)), [ok(0)])
    assert registry.status(job_id).waiting_for == ("c",)
    assert [job.waiting_for for job in registry.jobs()] == [("c",)]
    registry.control.cancel(job_id)
    last = must_claim(registry.leases(models=[]), UnitRef.shard(job_id, 2))
    registry.leases().put(last, [ok(2)])
    other = must_claim(registry.leases(models=[]), UnitRef.shard(job_id, 1))
    registry.leases().put(other, [ok(1)])
    assert registry.status(job_id).waiting_for == ()


def test_a_job_waits_for_its_model_before_it_is_planned(registry: TestRegistry) -> None:
    job_id = registry.submit([b"x"], SubmitOptions(model="hub/a"))
    assert (registry.status(job_id).model, registry.status(job_id).waiting_for) == ("hub/a", ("hub/a",))
    registry.serve("a")
    assert registry.status(job_id).waiting_for == ()


def test_a_guilty_shard_of_a_model_is_split_into_parts_of_it(registry: TestRegistry) -> None:
    shard = UnitRef.shard(registry.running_job(range(32), model="a"), 0)
    leases = registry.leases(models=["a"])
    leases.begin_alone(must_claim(leases, shard, alone=True))
    registry.lapse(shard)
    assert leases.claim(shard, alone=True) is ClaimRefusal.SPLIT
    part = must_claim(leases, UnitRef.shard(shard.job_id, 1), alone=True)
    assert (part.model, len(part.missing)) == ("a", 2)
    assert registry.redis.hget(registry.keys.job(shard.job_id), "m:a") == b"16"


@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "ä model", "x" * 200, "a\x06\x163"])
def test_a_name_that_is_no_plain_word_has_a_queue_of_plain_letters(model: str) -> None:
    assert queue_of(model).startswith("millrace.sha256-")
    assert queue_of(model).isascii()
    assert queue_of(model) != queue_of(model + "x")


def test_queues_are_named_after_models() -> None:
    assert (queue_of(""), queue_of("Qwen3-0.6B")) == ("millrace", "millrace.Qwen3-0.6B")
