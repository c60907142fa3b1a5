"""Questions about jobs: pages of records, the list of jobs, the keys and scripts they use."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from importlib import resources
from typing import cast

import pytest

from settings import RedisSettings
from tests.support.registry import TestRegistry, must_claim, ok
from worker.client import BatchClient
from worker.registry import jobs as job_queries
from worker.registry.connect import connect_async
from worker.registry.errors import InvalidJobId, JobNotFound, ResultsLost, ResultsRewound
from worker.registry.exchange import Command, perform, perform_async
from worker.registry.jobs import PAGE_JOBS, JobControl, JobQueries, ResultOrder, ResultPage
from worker.registry.keys import Keys, UnitRef
from worker.registry.leases import Claim
from worker.registry.lifecycle import PutStatus
from worker.registry.lua import Script, ScriptCall, Scripts, script_source
from worker.registry.queues import lanes_by_priority
from worker.schemas import BatchError, JobFilter, SubmitOptions

NUM_LINES = 6

EXPECTED = ResultPage([b"0", b"1"], [0, 1], 2, num_places=2, is_last=True, has_ended=True, is_overdue=False)


class Pages:
    """A running job of six lines, its records and its pages."""

    def __init__(self, registry: TestRegistry) -> None:
        self.registry = registry
        self.job_id = registry.running_job(range(NUM_LINES))
        self.leases = registry.leases()
        self.shard: Claim = must_claim(self.leases, UnitRef.shard(self.job_id, 0))

    def write(self, *indices: int, size: int = 1) -> None:
        self.leases.put(self.shard, [ok(index, f"{index}".ljust(size)) for index in indices])

    def page(self, cursor: int, order: ResultOrder = ResultOrder.INPUT) -> ResultPage:
        return perform(self.registry.redis, JobQueries(self.registry.keys).page(self.job_id, cursor, order))


@pytest.fixture
def pages(registry: TestRegistry) -> Pages:
    return Pages(registry)


def numbers(page: ResultPage) -> list[int]:
    return [int(record) for record in page.records]


def test_completion_order_is_that_of_writing_and_the_cursor_counts_records(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_queries, "PAGE_RECORDS", 2)
    pages.write(4, 0, 3)
    first = pages.page(0, ResultOrder.COMPLETION)
    assert (numbers(first), first.cursor, first.is_last, first.has_ended) == ([4, 0], 2, False, False)
    second = pages.page(2, ResultOrder.COMPLETION)
    assert (numbers(second), second.cursor, second.is_last) == ([3], 3, True)


def test_input_order_ends_before_the_first_line_that_is_not_done(pages: Pages) -> None:
    pages.write(4, 1, 0, 3)
    page = pages.page(0)
    assert (numbers(page), page.cursor, page.is_last, page.has_ended) == ([0, 1], 2, True, False)
    assert numbers(pages.page(2)) == []
    pages.write(2)
    assert numbers(pages.page(2)) == [2, 3, 4]


def test_an_ended_job_is_read_to_its_end_in_pages(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_queries, "PAGE_RECORDS", 4)
    pages.write(*reversed(range(NUM_LINES)))
    read: list[tuple[Sequence[int], bool]] = []
    cursor = 0
    while not read or not read[-1][1]:
        page = pages.page(cursor)
        assert page.has_ended
        read.append((numbers(page), page.is_last))
        cursor = page.cursor
    assert read == [([0, 1, 2, 3], False), ([4, 5], True)]
    assert numbers(pages.page(NUM_LINES)) == numbers(pages.page(10**9)) == []


@pytest.mark.parametrize("order", list(ResultOrder))
def test_a_page_has_a_bound_in_bytes(pages: Pages, order: ResultOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_queries, "PAGE_BYTES", 100)
    pages.write(0, 1, 2, size=40)
    pages.write(3, size=400)
    pages.write(4, 5)
    found, cursor, is_last = [], 0, False
    while not is_last:
        page = pages.page(cursor, order)
        found.append(numbers(page))
        cursor, is_last = page.cursor, page.is_last
    assert found == [[0, 1], [2], [3], [4, 5]]


@pytest.mark.parametrize("order", list(ResultOrder))
def test_records_that_expired_under_the_reader_are_no_empty_job(pages: Pages, order: ResultOrder) -> None:
    pages.write(*range(NUM_LINES))
    keys, client = pages.registry.keys, pages.registry.redis
    client.delete(keys.records(pages.job_id))
    with pytest.raises(ResultsLost, match=f"of {NUM_LINES} records 0 are left"):
        pages.page(0, order)
    client.hset(keys.job(pages.job_id), "retain", 1)  # the job itself would expire now
    with pytest.raises(JobNotFound):
        pages.page(0, order)


def test_a_lost_order_is_no_empty_job_and_the_lines_order_reads_on(pages: Pages) -> None:
    pages.write(*range(NUM_LINES))
    pages.registry.redis.delete(pages.registry.keys.order(pages.job_id))
    with pytest.raises(ResultsLost, match="and 0 places of their order"):
        pages.page(0, ResultOrder.COMPLETION)
    assert numbers(pages.page(0)) == list(range(NUM_LINES))


def test_a_page_tells_that_another_record_stands_before_it(pages: Pages) -> None:
    pages.write(4, 0, 3)
    page = JobQueries(pages.registry.keys).page
    for cursor, last, found in ((2, 0, [3]), (3, 3, [])):
        exchange = page(pages.job_id, cursor, ResultOrder.COMPLETION, last)
        assert numbers(perform(pages.registry.redis, exchange)) == found
    for cursor, last in ((2, 4), (4, 3)):
        with pytest.raises(ResultsRewound):
            perform(pages.registry.redis, page(pages.job_id, cursor, ResultOrder.COMPLETION, last))


def test_a_job_that_ended_without_some_records_is_read_over_the_gaps(pages: Pages) -> None:
    pages.write(1, 3)
    pages.registry.redis.hset(pages.registry.keys.job(pages.job_id), "st", "failed")
    page = pages.page(0)
    assert (numbers(page), page.cursor, page.is_last) == ([1, 3], NUM_LINES, True)


def test_a_job_that_ended_without_any_record_has_none(pages: Pages) -> None:
    pages.registry.redis.hset(pages.registry.keys.job(pages.job_id), "st", "failed")
    page = pages.page(0)
    assert (numbers(page), page.is_last, page.has_ended) == ([], True, True)


def _jobs(registry: TestRegistry, count: int) -> list[str]:
    """Jobs, the oldest first."""
    job_ids = [registry.submit([b"x"]) for _ in range(count)]
    registry.redis.zadd(registry.keys.jobs, {job_id: number for number, job_id in enumerate(job_ids, 1)})
    return job_ids


def test_dropping_forgotten_jobs_skips_no_live_one(registry: TestRegistry) -> None:
    job_ids = _jobs(registry, 6)
    for job_id in job_ids[-2:]:
        registry.redis.delete(registry.keys.job(job_id))
    assert [job.id for job in registry.jobs(2)] == [job_ids[3], job_ids[2]]
    assert registry.redis.zcard(registry.keys.jobs) == 4


def _listed(registry: TestRegistry, tenant: str, limit: int = 100) -> list[str]:
    found = perform(registry.redis, JobQueries(registry.keys).jobs(limit, JobFilter(tenant=tenant)))
    return [job.id for job in found]


def test_a_tenants_jobs_are_found_without_looking_at_anothers(registry: TestRegistry) -> None:
    ours = [registry.submit([b"x"], SubmitOptions(tenant="a")) for _ in range(3)]
    theirs = registry.submit([b"x"], SubmitOptions(tenant="b"))
    registry.redis.delete(registry.keys.jobs)  # whatever is in it, such as 10 000 of another's
    assert sorted(_listed(registry, "a")) == sorted(ours)
    assert _listed(registry, "b") == [theirs]
    assert _listed(registry, "c") == []
    registry.redis.hset(registry.keys.job(theirs), "st", "done")
    JobControl(registry.redis, registry.keys).delete(theirs)
    assert registry.redis.zcard(registry.keys.jobs_of("b")) == 0


def test_a_tenants_list_does_not_grow_with_jobs_that_are_forgotten(registry: TestRegistry) -> None:
    for _ in range(8):
        job_id = registry.submit([b"x"], SubmitOptions(tenant="a"))
        registry.redis.delete(registry.keys.job(job_id))
    assert registry.redis.zcard(registry.keys.jobs_of("a")) <= 2
    assert _listed(registry, "a") == []
    assert registry.redis.zcard(registry.keys.jobs_of("a")) == 0


def test_a_tenants_list_is_kept_as_long_as_what_is_in_it(registry: TestRegistry, client: BatchClient) -> None:
    own, no = registry.keys.jobs_of("a"), BatchError(code="invalid_request", message="no")

    def submitted(result_ttl_s: int) -> str:
        return registry.submit([b"x"], SubmitOptions(tenant="a", result_ttl_s=result_ttl_s))

    def is_kept_for(seconds: float) -> bool:
        return seconds - 60 < registry.redis.ttl(own) <= seconds

    short, long = submitted(3600), submitted(7200)
    client.cancel(long)
    assert is_kept_for(732 * 86400)  # one is open
    client.cancel(short)
    assert is_kept_for(7200)
    client.cancel(submitted(60))
    assert is_kept_for(7200)
    registry.intake().refuse(registry.keys.new_job_id(), no, "a")
    assert is_kept_for(RedisSettings().result_ttl_s)
    last = submitted(60)
    registry.intake().refuse(registry.keys.new_job_id(), no, "a")
    assert is_kept_for(732 * 86400)
    client.cancel(last)
    assert is_kept_for(RedisSettings().result_ttl_s)


def test_the_newest_jobs_come_first_and_no_more_than_asked_for(registry: TestRegistry) -> None:
    job_ids = _jobs(registry, 3)
    assert [job.id for job in registry.jobs(2)] == [job_ids[2], job_ids[1]]
    assert [job.id for job in registry.jobs(10)] == job_ids[::-1]
    assert registry.jobs(0) == []


def test_jobs_that_match_are_found_behind_many_that_do_not(registry: TestRegistry) -> None:
    wanted = registry.submit([b"x"], SubmitOptions(tenant="a"))
    for _ in range(PAGE_JOBS + 1):
        registry.submit([b"x"])
    queries = JobQueries(registry.keys)

    found = perform(registry.redis, queries.jobs(1, JobFilter(tenant="a")))

    assert [job.id for job in found] == [wanted]


def test_a_forgotten_job_makes_no_beginning_ambiguous(registry: TestRegistry) -> None:
    job_ids = _jobs(registry, 3)
    registry.redis.delete(registry.keys.job(job_ids[0]), registry.keys.job(job_ids[2]))
    queries = JobQueries(registry.keys)

    assert perform(registry.redis, queries.find("latest")) == job_ids[1]
    assert perform(registry.redis, queries.find("s0-0")) == job_ids[1]


@pytest.fixture
def job_id(registry: TestRegistry) -> str:
    job_id = registry.running_job(range(2))
    leases = registry.leases()
    leases.put(must_claim(leases, UnitRef.shard(job_id, 0)), [ok(index, f"{index}") for index in range(2)])
    return job_id


@pytest.mark.parametrize("order", list(ResultOrder))
def test_a_page_is_one_command_in_one_exchange(registry: TestRegistry, job_id: str, order: ResultOrder) -> None:
    exchange = JobQueries(registry.keys).page(job_id, 0, order)
    [command] = cast("list[Command]", next(exchange))
    assert cast("ScriptCall", command).script is Scripts.PAGE
    with pytest.raises(StopIteration) as end:
        exchange.send([[b"page", 1, 1, 0, 3, 1, [b"2"], [b"record"]]])
    assert end.value.value == ResultPage([b"record"], [2], 1, 3, is_last=True, has_ended=False, is_overdue=True)


def test_a_redis_that_lost_its_scripts_is_given_them_again(registry: TestRegistry, job_id: str) -> None:
    queries = JobQueries(registry.keys)
    for _ in range(2):
        registry.redis.script_flush()
        assert perform(registry.redis, queries.page(job_id, 0, ResultOrder.COMPLETION)) == EXPECTED


def test_several_calls_of_a_script_are_made_again_once_it_is_there(registry: TestRegistry) -> None:
    leases, job_id = registry.leases(), registry.running_job([0], [1])
    claims = [must_claim(leases, UnitRef.shard(job_id, number)) for number in range(2)]
    registry.redis.script_flush()
    assert [status for status, _, _ in leases.renew(claims)] == [PutStatus.OPEN] * 2


def test_a_script_reads_as_many_keys_and_arguments_as_are_declared() -> None:
    declared = {script.name: script for script in vars(Scripts).values() if isinstance(script, Script)}
    for name, script in declared.items():
        source = script_source(name)
        assert _largest(r"KEYS\[(\d+)\]", script.source if script.is_about_unit else source) == len(script.keys), name
        if not script.row:
            assert _largest(r"ARGV\[(\d+)\]", source) <= len(script.arguments), name
        for first, step in re.findall(r"for i = (\d+), #ARGV, (\d+) do", source):
            assert (int(first), int(step)) == (len(script.arguments) + 1, len(script.row)), name
    files = resources.files("worker.registry").joinpath("scripts").iterdir()
    assert {f"{name}.lua" for name in [*declared, "prelude"]} == {file.name for file in files}


def test_scripts_that_are_about_no_unit_call_nothing_that_names_its_keys() -> None:
    """In the library these keys would be those of whatever call came before."""
    prelude = script_source("prelude")
    keys = re.findall(r"\b[A-Z]+\b", prelude.partition("local JOB")[2].partition("\n")[0])
    bodies = dict(re.findall(r"^local function (\w+)\(.*?\)\n(.*?)^end$", prelude, re.DOTALL | re.MULTILINE))
    names = {"JOB", *keys}
    for function, body in bodies.items():  # a function stands behind those that it calls
        if names & set(re.findall(r"\w+", body)):
            names.add(function)
    assert {"enqueue", "requeue", "finish"} <= names
    for script in {script for script in vars(Scripts).values() if isinstance(script, Script)}:
        source = script_source(script.name)
        called = names & set(re.findall(r"\b(\w+)\(", source)) - set(re.findall(r"local function (\w+)", source))
        assert script.is_about_unit or not called, script.name


def _largest(pattern: str, source: str) -> int:
    return max((int(number) for number in re.findall(pattern, source)), default=0)


def test_a_call_that_lacks_an_argument_or_a_value_of_a_row_is_refused() -> None:
    keys = Keys().of_unit_scripts(UnitRef.plan(Keys().new_job_id()))
    with pytest.raises(TypeError, match=r"stage\.lua is given"):
        Scripts.STAGE(keys)
    with pytest.raises(TypeError, match=r"stage\.lua is given a row of 1"):
        Scripts.STAGE(keys, [(0,)], staging_ms=1)


def test_a_reader_in_an_event_loop_gives_them_too(registry: TestRegistry, job_id: str) -> None:
    async def page() -> ResultPage:
        async with connect_async(registry.settings) as client:
            return await perform_async(client, JobQueries(registry.keys).page(job_id, 0, ResultOrder.INPUT))

    registry.redis.script_flush()
    assert asyncio.run(page()) == EXPECTED


def test_new_ids_are_valid_distinct_and_sort_by_time() -> None:
    keys = Keys()
    ids = [keys.new_job_id() for _ in range(50)]
    assert len(set(ids)) == 50
    assert all(keys.check_job_id(job_id) == job_id for job_id in ids)
    assert ids[0][:15] <= ids[-1][:15]
    assert ids[0][17] == "7"  # s0-xxxxxxxx-xxxx-7...: a version 7 UUID


@pytest.mark.parametrize(
    "job_id",
    [
        "",
        "s0",
        "s1-" + "0" * 36,
        "s0-" + "0" * 35,
        "s0-" + "0" * 36 + "\n",
        "s0-" + "g" * 36,
        "s0-*" + "0" * 35,
        None,
        7,
    ],
)
def test_what_is_no_job_id_names_no_key(job_id: object) -> None:
    with pytest.raises(InvalidJobId, match="accepted"):
        Keys().check_job_id(job_id)


@pytest.mark.parametrize("unit", ["", "-1", "1:x", "plans", "*", "1" * 10])
def test_what_is_no_unit_names_no_key(unit: str) -> None:
    keys = Keys()
    with pytest.raises(InvalidJobId, match="accepted: plan or a number"):
        keys.unit(UnitRef(keys.new_job_id(), unit))


def test_every_key_of_a_job_lies_in_one_hash_slot() -> None:
    keys = Keys()
    names = list(keys.of_unit_scripts(UnitRef.shard(keys.new_job_id(), 3)).values())
    names += [keys.idempotency("t", "k\ud800"), keys.tenant_counters("t")]
    assert all(name.startswith("millrace:{s0}:") for name in names)


def test_members_of_the_open_set_name_their_unit() -> None:
    ref = UnitRef.shard("s0-" + "0" * 36, 12)
    assert UnitRef.of_member(str(ref)) == ref


def test_ten_priorities_share_four_lanes() -> None:
    lanes = lanes_by_priority()
    assert len(lanes) == 10
    assert len(set(lanes)) == 4
    assert lanes[0] == lanes[2] == "millrace"
    assert lanes[9] == "millrace\x06\x169"
