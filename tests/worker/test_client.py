"""The producer's client where no worker runs."""

from __future__ import annotations

import io
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import redis

from settings import LimitSettings
from tests.support.redis_servers import configured
from tests.support.registry import TestRegistry, must_claim, ok
from worker.client import BatchClient
from worker.lines.files import read_raw_lines
from worker.registry.errors import (
    EmptyJob,
    InvalidJobId,
    InvalidOption,
    JobNotFound,
    JobReused,
    JobTooLarge,
    QueueFull,
    RedisFull,
)
from worker.registry.intake import Staged
from worker.registry.keys import UnitRef
from worker.registry.lifecycle import PutStatus
from worker.results import FIRST_POLL_S, LONGEST_POLL_S, PollPauses
from worker.schemas import JobState, SubmitOptions, batch_object


def test_importing_the_clients_brings_no_torch() -> None:
    code = "import worker.client, worker.async_client, sys; assert not {'torch', 'triton', 'engine'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_lines_of_every_kind_are_staged_as_they_are(client: BatchClient, registry: TestRegistry) -> None:
    lines: list[Any] = [b'{"prompt": "a"}\r\n', '{"prompt": "\ud800"}', {"prompt": "\ud800"}, b"  \n", "", b"\xff{"]
    job_id = client.submit(lines)
    assert client.status(job_id).request_counts.total == 4
    staged = registry.leases().lines(job_id, range(4))
    assert staged == [b'{"prompt": "a"}', b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": "\\ud800"}', b"\xff{"]


def test_a_byte_order_mark_of_an_open_file_is_left_out(client: BatchClient, registry: TestRegistry) -> None:
    job_id = client.submit(["\ufeff{}", "\ufeff{}"])
    assert registry.leases().lines(job_id, [0, 1]) == [b"{}", b"\xef\xbb\xbf{}"]


@pytest.mark.parametrize("one", [b"{}", "{}", bytearray(b"{}"), {"prompt": "a"}])
def test_one_line_in_place_of_lines_is_a_type_error(client: BatchClient, registry: TestRegistry, one: Any) -> None:
    with pytest.raises(TypeError, match=f"^lines is one {type(one).__name__}; accepted: an iterable of lines"):
        client.submit(one)
    assert registry.redis.keys("*") == []


@pytest.mark.parametrize("line", [3, None, True, ["{}"]])
def test_a_line_of_another_type_is_a_type_error(client: BatchClient, registry: TestRegistry, line: Any) -> None:
    with pytest.raises(TypeError, match=f"^line 3 is of type {type(line).__name__}; accepted: bytes, str, a mapping"):
        client.submit([b"x", b"", line])
    assert registry.redis.keys("*") == []


def test_any_mapping_is_a_line(client: BatchClient, registry: TestRegistry) -> None:
    job_id = client.submit([MappingProxyType({"prompt": "a"})])
    assert registry.leases().lines(job_id, [0]) == [b'{"prompt": "a"}']


def test_a_cut_line_with_a_blank_head_is_staged(redis_url: str, registry: TestRegistry) -> None:
    file = io.BytesIO(b" " * 1000 + b"{}\n{}\n")
    with BatchClient(redis_url, limits=LimitSettings(max_prompt_bytes=10)) as client:
        job_id = client.submit(read_raw_lines(file, 10))
    assert registry.leases().lines(job_id, [0, 1]) == [b" " * 11, b"{}"]


def test_a_submitted_job_is_announced_in_the_first_lane(client: BatchClient, registry: TestRegistry) -> None:
    job_id = client.submit([b"{}"], priority=9)
    frames = registry.redis.lrange("millrace", 0, -1)
    assert len(frames) == 1
    assert b"millrace.plan" in frames[0]
    assert client.status(job_id).priority == 9


def test_many_lines_are_sent_in_chunks_in_order(client: BatchClient, registry: TestRegistry) -> None:
    job_id = client.submit(b"%d" % number for number in range(1201))
    assert registry.leases().lines(job_id, [0, 499, 500, 1200]) == [b"0", b"499", b"500", b"1200"]


def test_an_overlong_line_is_cut_one_byte_above_the_limit(redis_url: str, registry: TestRegistry) -> None:
    with BatchClient(redis_url, limits=LimitSettings(max_prompt_bytes=10)) as client:
        job_id = client.submit([b"x" * 1000])
    assert registry.leases().lines(job_id, [0]) == [b"x" * 11]


def test_refused_jobs_leave_nothing_behind(redis_url: str, registry: TestRegistry) -> None:
    limits = LimitSettings(max_prompts_per_job=2, max_open_prompts=3, max_job_bytes=100, max_prompt_bytes=90)
    with BatchClient(redis_url, limits=limits) as client:
        with pytest.raises(EmptyJob):
            client.submit([b"", "\n"])
        with pytest.raises(JobTooLarge, match="max_prompts_per_job"):
            client.submit([b"x"] * 3)
        with pytest.raises(JobTooLarge, match="max_job_bytes"):
            client.submit([b"x" * 60, b"x" * 60])
        with pytest.raises(ZeroDivisionError):
            client.submit(b"%d" % (1 // number) for number in (1, 0))
        client.submit([b"x"] * 2)
        with pytest.raises(QueueFull):
            client.submit([b"x"] * 2)
        with pytest.raises(InvalidOption, match="priority is 10; accepted: a whole number, 0 to 9"):
            client.submit([b"x"], priority=10)
    assert len(registry.redis.keys("*:in")) == 1


def test_submitting_again_returns_the_first_job(client: BatchClient, registry: TestRegistry) -> None:
    first = client.submit([b"a"], idempotency_key="nightly")
    assert client.submit(["a\n", ""], idempotency_key="nightly") == first
    mine = registry.keys.new_job_id()
    assert client.submit([b"a"], job_id=mine) == mine
    assert client.submit([b"a"], job_id=mine) == mine
    assert len(client.jobs()) == 2
    assert len(registry.redis.keys("*:in*")) == 2


@pytest.mark.parametrize("lines", [[b"b"], [b"a", b"c"], [b"a"], [b"a", b"b", b"c"], [b"ab"], [b"b", b"a"]], ids=str)
def test_other_lines_under_a_key_or_id_are_refused_by_name(
    client: BatchClient, registry: TestRegistry, lines: list[bytes]
) -> None:
    mine = registry.keys.new_job_id()
    client.submit([b"a", b"b"], job_id=mine, idempotency_key="nightly")
    with pytest.raises(JobReused, match=rf"^idempotency_key 'nightly' is of job {mine}, which has other lines;"):
        client.submit(lines, idempotency_key="nightly")
    with pytest.raises(JobReused, match=rf"^job {mine} has other lines; accepted: the same again, or a new job_id$"):
        client.submit(lines, job_id=mine)
    assert registry.leases().lines(mine, [0, 1]) == [b"a", b"b"]
    assert len(registry.redis.keys("*:in*")) == 1


def test_a_key_is_refused_with_options_that_change_the_records(client: BatchClient) -> None:
    first = client.submit([b"a"], idempotency_key="nightly", priority=3)
    assert client.submit([b"a"], idempotency_key="nightly", priority=7, deadline_s=60, metadata={"a": "b"}) == first
    with pytest.raises(JobReused) as caught:
        client.submit([b"a"], idempotency_key="nightly", strict=True, model="m", endpoint="/v1/completions")
    assert (caught.value.job_id, caught.value.other) == (first, "endpoint, model, strict")


def test_a_job_of_an_older_version_is_the_first_job_whatever_its_lines(
    client: BatchClient, registry: TestRegistry
) -> None:
    first = client.submit([b"a"], idempotency_key="nightly")
    registry.redis.hdel(registry.keys.job(first), "digest")
    assert client.submit([b"b"], idempotency_key="nightly") == first
    assert client.submit([b"b"], job_id=first) == first


def test_two_submits_under_one_id_do_not_mix_their_lines(client: BatchClient, registry: TestRegistry) -> None:
    mine = registry.keys.new_job_id()

    def lines_of_the_slower() -> Iterator[bytes]:
        yield from [b"slow"] * 600  # the first 500 are in Redis by now
        client.submit([b"fast"] * 400, job_id=mine)
        yield from [b"slow"] * 600

    with pytest.raises(JobReused):
        client.submit(lines_of_the_slower(), job_id=mine)
    assert list(registry.redis.hgetall(registry.keys.lines(mine)).values()) == [b"fast"] * 400
    assert client.status(mine).request_counts.total == 400
    assert len(registry.redis.keys("*:in*")) == 1


def test_a_first_job_deleted_while_lines_are_compared_is_not_found(client: BatchClient, registry: TestRegistry) -> None:
    first = client.submit([b"a"], idempotency_key="nightly")
    client.cancel(first)

    def lines() -> Iterator[bytes]:
        client.delete(first)
        yield b"a"

    with pytest.raises(JobNotFound, match=first):
        client.submit(lines(), idempotency_key="nightly")
    assert client.submit([b"a"], idempotency_key="nightly") != first


def test_a_full_redis_takes_no_job_and_says_what_to_do(
    client: BatchClient, registry: TestRegistry, redis_url: str
) -> None:
    def fill_up() -> Iterator[bytes]:
        yield from [b"x"] * 10
        registry.redis.config_set("maxmemory", 1)

    with configured(redis_url, maxmemory="0"):
        with pytest.raises(RedisFull, match=r"Redis is full \(OOM.*millrace delete JOB"):
            client.submit(fill_up())  # before its one chunk is sent
        job_id = registry.keys.new_job_id()
        registry.redis.config_set("maxmemory", 0)
        registry.intake().stage(job_id, 0, [b"x"], "n")
        registry.redis.config_set("maxmemory", 1)
        with pytest.raises(redis.exceptions.OutOfMemoryError):  # RedisFull is one, for who knows Redis' errors alone
            registry.intake().submit(job_id, 1, SubmitOptions(), Staged("n"))
        registry.intake().discard(job_id, "n")
    assert registry.redis.keys("*") == []


def test_a_full_redis_lets_jobs_be_cancelled_and_deleted(
    client: BatchClient, registry: TestRegistry, redis_url: str
) -> None:
    queued, running = client.submit([b'{"prompt": "a"}'] * 3), registry.running_job([0, 1], [2])
    leases = registry.leases()
    held = must_claim(leases, UnitRef.shard(running, 0))
    with configured(redis_url, maxmemory="1"):
        assert leases.renew([held])[0][0] is PutStatus.OPEN
        with pytest.raises(redis.ResponseError, match="command not allowed when used memory"):
            leases.put(held, [ok(0)])
        assert client.cancel(queued).status is JobState.CANCELLED
        assert client.cancel(running).status is JobState.CANCELLING
        leases.put(held, [ok(0), ok(1)], at_end=True)
        assert client.status(running).status is JobState.CANCELLED
        for job_id in (queued, running):
            client.delete(job_id)
    assert not registry.redis.keys(f"{registry.keys.prefix}j:*")


def test_cancelling_a_job_nobody_runs_gives_every_prompt_a_record(client: BatchClient) -> None:
    job_id = client.submit([{"custom_id": "mine", "prompt": "a"}, b"{bad", {"prompt": "b"}])
    job = client.cancel(job_id)
    assert job.status is JobState.CANCELLED
    records = list(client.results(job_id))
    assert [record["custom_id"] for record in records] == ["mine", None, "line-3"]
    assert records[0]["error"]["code"] == "batch_cancelled"
    assert records[0]["response"] is None
    assert records[1]["response"]["body"]["error"]["code"] == "invalid_json_line"
    assert list(client.errors(job_id)) == records
    assert client.cancel(job_id) == job


def test_cancelling_leaves_the_units_of_others_to_them(client: BatchClient, registry: TestRegistry) -> None:
    job_id = registry.running_job([0, 1], [2])
    held = must_claim(registry.leases(), UnitRef.shard(job_id, 0))
    job = client.cancel(job_id)
    assert (job.status, job.request_counts.failed) == (JobState.CANCELLING, 1)
    assert registry.leases().renew([held])[0][0] is PutStatus.OPEN


def test_a_job_with_nothing_left_to_cancel_completes(client: BatchClient, registry: TestRegistry) -> None:
    job_id = registry.running_job([0, 1])
    leases = registry.leases()
    held = must_claim(leases, UnitRef.shard(job_id, 0))
    assert client.cancel(job_id).status is JobState.CANCELLING
    leases.put(held, [ok(0), ok(1)])
    job = client.status(job_id)
    assert (job.status, job.request_counts.completed) == (JobState.COMPLETED, 2)
    assert (batch_object(job)["status"], batch_object(job)["cancelled_at"]) == ("completed", None)
    assert batch_object(job)["cancelling_at"] is not None  # it was asked for


def test_a_job_of_which_one_prompt_was_cancelled_is_cancelled(client: BatchClient, registry: TestRegistry) -> None:
    job_id = registry.running_job([0, 1], [2])
    leases = registry.leases()
    held = must_claim(leases, UnitRef.shard(job_id, 0))
    client.cancel(job_id)
    leases.put(held, [ok(0), ok(1)])
    assert client.status(job_id).status is JobState.CANCELLED


def test_results_can_be_read_on_from_a_cursor(client: BatchClient, registry: TestRegistry) -> None:
    job_id = registry.running_job([0, 1, 2])
    leases = registry.leases()
    shard = must_claim(leases, UnitRef.shard(job_id, 0))
    leases.put(shard, [ok(2, '{"i": 2}'), ok(0, '{"i": 0}')])
    assert [record["i"] for record in client.results(job_id)] == [2, 0]
    following = client.results(job_id, cursor=1, follow=True)
    assert next(following)["i"] == 0
    leases.put(shard, [ok(1, '{"i": 1}')])
    assert [record["i"] for record in following] == [1]


def test_results_in_input_order_wait_for_the_next_line(client: BatchClient, registry: TestRegistry) -> None:
    job_id = registry.running_job([0, 1, 2])
    leases = registry.leases()
    shard = must_claim(leases, UnitRef.shard(job_id, 0))
    leases.put(shard, [ok(2, '{"i": 2}'), ok(0, '{"i": 0}')])
    assert [record["i"] for record in client.results(job_id, order="input")] == [0]
    following = client.results(job_id, follow=True, order="input")
    assert next(following)["i"] == 0
    leases.put(shard, [ok(1, '{"i": 1}')])
    assert [record["i"] for record in following] == [1, 2]
    assert [record["i"] for record in client.results(job_id, cursor=1, order="input")] == [1, 2]


@pytest.mark.parametrize("reading", [{"cursor": -1}, {"cursor": True}, {"cursor": 0.5}, {"order": "random"}])
def test_a_cursor_or_order_that_there_is_not_is_refused_at_once(client: BatchClient, reading: dict[str, Any]) -> None:
    [(name, value)] = reading.items()
    with pytest.raises(ValueError, match=rf"^{name} is {value!r}; accepted: "):
        client.results("s0-1", **reading)


def test_waiting_ends_with_the_job_or_the_time(client: BatchClient, registry: TestRegistry) -> None:
    job_id = registry.running_job([0])
    with pytest.raises(TimeoutError, match="0 of 1 prompts"):
        client.wait(job_id, timeout_s=0.05)
    leases = registry.leases()
    leases.put(must_claim(leases, UnitRef.shard(job_id, 0)), [ok(0)])
    assert client.wait(job_id, timeout_s=60).status is JobState.COMPLETED


def test_jobs_are_listed_newest_first_without_the_forgotten(client: BatchClient, registry: TestRegistry) -> None:
    ids = [client.submit([b"x"]) for _ in range(3)]
    registry.redis.delete(registry.keys.job(ids[1]))
    assert sorted(job.id for job in client.jobs()) == sorted([ids[0], ids[2]])
    assert len(client.jobs(limit=1)) == 1


def test_unknown_jobs_are_not_found_and_bad_ids_are_named(client: BatchClient, registry: TestRegistry) -> None:
    unknown = registry.keys.new_job_id()
    for call in (client.status, client.cancel, client.wait, lambda job_id: next(client.results(job_id))):
        with pytest.raises(JobNotFound, match=unknown):
            call(unknown)
        with pytest.raises(InvalidJobId):
            call("nonsense")


def test_a_job_is_accepted_although_its_message_cannot_be_sent(
    client: BatchClient, registry: TestRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    registry.redis.set("millrace", "not a list: publishing fails")
    job_id = client.submit([b"x"])
    assert client.status(job_id).status is JobState.VALIDATING
    assert "a reaper will" in caplog.text


def test_a_unix_socket_serves_registry_and_queue(redis_url: str, redis_directory: Path) -> None:
    with BatchClient(f"unix://{redis_directory}/redis.sock?db=2") as client:
        job_id = client.submit([b"x"])
        assert client.status(job_id).status is JobState.VALIDATING
    with redis.Redis.from_url(redis_url.removesuffix("/0") + "/2") as database:
        assert database.llen("millrace") == 1


def test_pauses_double_to_the_longest_and_start_again_with_news() -> None:
    pauses = PollPauses()
    found = [pauses.next_s() for _ in range(8)]
    assert found[:3] == [FIRST_POLL_S, 2 * FIRST_POLL_S, 4 * FIRST_POLL_S]
    assert found[-1] == LONGEST_POLL_S
    pauses.restart()
    assert pauses.next_s() == FIRST_POLL_S


def test_no_pause_is_longer_than_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    pauses = PollPauses(timeout_s=0.05)
    assert pauses.next_s() == FIRST_POLL_S
    now_s = 100.04
    assert pauses.next_s() == pytest.approx(0.01)
    now_s = 101.0
    assert pauses.next_s() == 0.0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"priorty": 1}, "priorty is not an option of a job; accepted: priority"),
        ({"deadline_s": -1}, "deadline_s is -1; accepted: seconds, above 0, at most 31536000 (a year)"),
        ({"tenant": "a b"}, 'tenant is "a b"; accepted: 1 to 64 letters, digits, ., _ and - (ASCII)'),
        ({"strict": "perhaps"}, 'strict is "perhaps"; accepted: true or false'),
        (
            {"metadata": {"note": "secret" * 100}},
            "metadata.note has 600 characters; accepted: at most 16 pairs of text, keys of 1 to 64 characters, values "
            "of at most 512",
        ),
        ({"idempotency_key": ""}, "idempotency_key has 0 characters; accepted: 1 to 256 characters"),
    ],
    ids=str,
)
def test_a_bad_option_is_one_line_that_says_what_is_accepted(
    client: BatchClient, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidOption) as raised:
        client.submit([b"{}"], **options)

    assert str(raised.value) == told
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize("option", SubmitOptions.model_fields)
def test_what_is_accepted_for_an_option_is_said_in_words(option: str) -> None:
    assert SubmitOptions.accepted(option)
