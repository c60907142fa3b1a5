"""What a reader of results gives while Redis goes back under it, and of results that are lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support.processes import wait_until, warm_interpreter
from tests.support.registry import TestRegistry, ended_job, forgotten, must_claim, ok
from tests.support.workers import CLI
from worker import results as module
from worker.async_client import AsyncBatchClient
from worker.cli.main import cli
from worker.client import BatchClient
from worker.registry import jobs as job_queries
from worker.registry.errors import JobNotFound, RegistryError, ResultsLost, ResultsRewound
from worker.registry.keys import UnitRef
from worker.registry.leases import PromptRecord
from worker.registry.lifecycle import PutStatus
from worker.results import LineSet

FOUR = range(4)


def records(*indices: int) -> list[PromptRecord]:
    return [ok(index, json.dumps({"i": index, "response": {"status_code": 200}})) for index in indices]


class Job:
    """A job of one shard, whose records are written and lost."""

    def __init__(self, registry: TestRegistry, num_lines: int = len(FOUR)) -> None:
        self.registry = registry
        self.id = registry.running_job(range(num_lines))
        self._shard = UnitRef.shard(self.id, 0)
        self._claim = must_claim(registry.leases(), self._shard)

    def write(self, *indices: int) -> None:
        """Write them as whoever holds the shard, who finds that it went back if it did."""
        leases = self.registry.leases()
        if leases.put(self._claim, records(*indices))[0] is PutStatus.REWOUND:
            self._claim = must_claim(leases, self._shard)
            leases.put(self._claim, records(*indices))


@pytest.fixture
def job(registry: TestRegistry) -> Job:
    return Job(registry)


def read(results: Iterator[dict[str, Any]], count: int = -1) -> list[int]:
    """The lines of the next `count` records, or of all."""
    found: list[int] = []
    while len(found) != count and (record := next(results, None)) is not None:
        found.append(record["i"])
    return found


def test_what_is_written_again_in_another_order_comes_once(
    client: BatchClient, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    results = client.results(job.id, follow=True)
    job.write(0)
    with forgotten(job.registry):
        job.write(2, 1)
        assert read(results, 3) == [0, 2, 1]
    job.write(1, 3)
    assert read(results, 1) == [3]
    job.write(2)
    assert (read(results), results.num_rewinds) == ([], 1)
    assert f"lost records of job {job.id} that were read: reading its results from the start" in caplog.text


def test_a_loss_is_found_though_the_same_record_stands_last(client: BatchClient, job: Job) -> None:
    results = client.results(job.id, follow=True)
    with forgotten(job.registry):
        job.write(0, 1, 2)
        assert read(results, 3) == [0, 1, 2]
    job.write(3, 0, 2)  # the third is the third that was read
    job.write(1)
    assert (read(results), results.num_rewinds) == ([3], 1)


def test_without_a_loss_nothing_begins_again(client: BatchClient, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_queries, "PAGE_RECORDS", 2)
    job.write(3, 1, 0, 2)
    results = client.results(job.id, follow=True)
    assert (read(results), results.num_rewinds) == ([3, 1, 0, 2], 0)


@pytest.mark.parametrize("chunk", [1, 2, 20_000])
def test_a_cursor_goes_on_after_the_last_record_taken(
    client: BatchClient, job: Job, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_INDICES", chunk)
    job.write(3, 1, 0, 2)
    results = client.results(job.id)
    assert results.cursor == "0"
    for count in range(1, 5):
        read(results, 1)
        rest = client.results(job.id, results.cursor)
        assert rest.cursor == results.cursor
        assert read(rest) == [3, 1, 0, 2][count:]
        assert read(client.results(job.id, count)) == [3, 1, 0, 2][count:]


def test_a_cursor_of_input_order_is_the_next_line(client: BatchClient, job: Job) -> None:
    job.write(3, 1, 0, 2)
    results = client.results(job.id, order="input")
    assert (read(results, 3), results.cursor) == ([0, 1, 2], "3")
    assert read(client.results(job.id, results.cursor, order="input")) == [3]


def test_a_cursor_of_what_was_lost_is_an_error_that_says_what_to_do(client: BatchClient, job: Job) -> None:
    results = client.results(job.id)
    with forgotten(job.registry):
        job.write(0, 1)
        read(results, 2)
    with pytest.raises(ResultsRewound, match="first 2 records are not those of the cursor"):  # nothing is there yet
        read(client.results(job.id, results.cursor))
    job.write(2, 1, 0, 3)  # the second is the second that was read
    with pytest.raises(ResultsRewound, match="read all results once more, from cursor 0"):
        read(client.results(job.id, results.cursor))


def test_a_number_beyond_the_records_may_be_a_mistake(client: BatchClient, job: Job) -> None:
    job.write(0, 1)
    with pytest.raises(ResultsRewound, match="it has 2 records, fewer than the cursor 3, unless that is wrong"):
        read(client.results(job.id, 3))


def test_a_cursor_is_good_if_the_same_records_stand_first(client: BatchClient, job: Job) -> None:
    results = client.results(job.id)
    with forgotten(job.registry):
        job.write(0, 1)
        read(results, 2)
    job.write(1, 0, 3, 2)
    assert read(client.results(job.id, results.cursor)) == [3, 2]


@pytest.mark.parametrize("is_number", [True, False])
def test_a_reader_that_was_resumed_survives_the_next_loss(client: BatchClient, job: Job, is_number: bool) -> None:
    first = client.results(job.id)
    job.write(0)
    with forgotten(job.registry):
        job.write(1)
        read(first, 2)
        results = client.results(job.id, 2 if is_number else first.cursor, follow=True)
        job.write(2)
        assert read(results, 1) == [2]
    job.write(3, 1, 2)
    assert (read(results), results.num_rewinds) == ([3], 1)


def test_a_number_beyond_the_records_is_an_error(client: BatchClient, job: Job) -> None:
    job.write(0, 1)
    with pytest.raises(ResultsRewound):
        read(client.results(job.id, 3))
    job.write(2, 3)
    with pytest.raises(ResultsRewound, match="5 records were read, and it has 4"):
        read(client.results(job.id, 5, order="input"))
    assert read(client.results(job.id, 4)) == read(client.results(job.id, 4, order="input")) == []


@pytest.mark.parametrize("order", ["completion", "input"])
def test_a_reader_of_an_ended_job_that_runs_again_does_not_just_end(
    client: BatchClient, job: Job, order: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_queries, "PAGE_RECORDS", 2)
    results = client.results(job.id, order=order)
    with forgotten(job.registry):
        job.write(0, 1, 2, 3)
        assert read(results, 2) == [0, 1]
    with pytest.raises(ResultsRewound, match="2 records were read of a job that had ended, and runs again"):
        read(results)


def test_a_record_that_the_job_no_longer_has_is_an_error(client: BatchClient, job: Job) -> None:
    results = client.results(job.id, follow=True)
    with forgotten(job.registry):
        job.write(0)
        read(results, 1)
    # Planned again, and refused: the models had changed.
    job.registry.redis.hset(job.registry.keys.job(job.id), mapping={"st": "failed", "n": 0})
    with pytest.raises(ResultsRewound, match="1 records were read, and it has 0"):
        read(results)


def test_a_reader_goes_on_after_an_error_of_redis(client: BatchClient, job: Job) -> None:
    results = client.results(job.id)
    with forgotten(job.registry):
        job.registry.redis.delete(job.registry.keys.job(job.id))
        with pytest.raises(JobNotFound):
            next(results)
    job.write(0, 1)
    assert read(results) == [0, 1]


def test_an_asynchronous_reader_does_the_same(redis_url: str, job: Job) -> None:
    async def follow() -> tuple[list[int], str, int]:
        async with AsyncBatchClient(redis_url) as client:
            results = client.results(job.id, follow=True)
            with forgotten(job.registry):
                job.write(0, 1)
                found = [(await anext(results))["i"] for _ in range(2)]
            job.write(3, 1, 2, 0)
            found += [record["i"] async for record in results]
            return found, results.cursor, results.num_rewinds

    found, cursor, num_rewinds = asyncio.run(follow())
    assert (found, num_rewinds) == ([0, 1, 3, 2], 1)
    with BatchClient(redis_url) as client:
        assert read(client.results(job.id, cursor)) == []


def test_an_order_that_names_a_record_twice_is_no_endless_loop(client: BatchClient, job: Job) -> None:
    job.write(0, 1)
    job.registry.redis.delete(job.registry.keys.order(job.id))
    job.registry.redis.rpush(job.registry.keys.order(job.id), 0, 0)
    with pytest.raises(ResultsRewound, match="changed their order"):
        read(client.results(job.id))


def _lose(registry: TestRegistry, job_id: str, part: str) -> None:
    keys = registry.keys
    registry.redis.delete(keys.records(job_id) if part == "records" else keys.order(job_id))


READINGS: Sequence[Callable[[BatchClient, str], object]] = (
    lambda client, job_id: list(client.results(job_id, follow=True)),
    lambda client, job_id: list(client.results(job_id, 2)),
    lambda client, job_id: list(client.errors(job_id)),
)
READINGS_OF_RECORDS: Sequence[Callable[[BatchClient, str], object]] = (
    lambda client, job_id: list(client.results(job_id, order="input")),
    lambda client, job_id: client.retry(job_id),
)


@pytest.mark.parametrize("part", ["records", "order"])
def test_lost_results_are_an_error_and_not_none(client: BatchClient, registry: TestRegistry, part: str) -> None:
    job_id = ended_job(registry, {0: ("line-1", "internal_error")})
    _lose(registry, job_id, part)
    for reading in (*READINGS, *(READINGS_OF_RECORDS if part == "records" else ())):
        with pytest.raises(ResultsLost, match=f"results of job {job_id} are lost: of 6 records"):
            reading(client, job_id)
    assert len(client.jobs()) == 1


def test_lost_results_are_the_asynchronous_clients_error_too(redis_url: str, registry: TestRegistry) -> None:
    job_id = ended_job(registry, {0: ("line-1", "internal_error")})
    _lose(registry, job_id, "records")

    async def errors() -> list[type[RegistryError]]:
        found = []
        async with AsyncBatchClient(redis_url) as client:
            for records in (client.results(job_id), client.results(job_id, order="input"), client.errors(job_id)):
                try:
                    await anext(records)
                except RegistryError as error:
                    found.append(type(error))
            try:
                await client.retry(job_id)
            except RegistryError as error:
                found.append(type(error))
        return found

    assert asyncio.run(errors()) == [ResultsLost] * 4


COMMANDS = [["results"], ["results", "--follow"], ["results", "--order", "input"], ["errors"], ["retry"], ["watch"]]


@pytest.mark.parametrize("command", COMMANDS)
def test_lost_results_are_exit_1_of_every_command(redis_url: str, registry: TestRegistry, command: list[str]) -> None:
    job_id = ended_job(registry, {0: ("line-1", "internal_error")})
    _lose(registry, job_id, "records")
    done = CliRunner().invoke(cli, [*command, job_id, "--redis-url", redis_url])
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1].startswith(f"millrace: results of job {job_id} are lost: of 6 records 0 are")


def test_a_set_of_lines_is_told_by_its_digest_whatever_the_order() -> None:
    some, same, other = LineSet([7, 1_000_000, 0]), LineSet([0, 7, 1_000_000]), LineSet([0, 7, 1_000_001])
    assert some.cursor == same.cursor != other.cursor
    assert (len(some), 7 in some, 8 in some, 2_000_000 in some) == (3, True, False, False)
    assert not some.add(7)
    copy = some.copy()
    assert copy.add(8)
    assert 8 not in some
    assert str(LineSet().cursor) == "0"


def test_a_command_says_that_redis_went_back_and_writes_each_once(redis_url: str, job: Job, tmp_path: Path) -> None:
    output, log = tmp_path / "out.jsonl", tmp_path / "log"
    arguments = ["results", job.id, "--follow", "-o", str(output), "--redis-url", redis_url]
    with log.open("wb") as file:
        process = warm_interpreter().start(CLI, arguments, file)
    with forgotten(job.registry):
        job.write(0, 1)
        wait_until(lambda: output.exists() and output.read_bytes().count(b"\n") == 2, timeout_s=100)
    job.write(3, 1, 2, 0)
    assert process.wait(100) == 0
    assert [json.loads(line)["i"] for line in output.read_bytes().splitlines()] == [0, 1, 3, 2]
    assert f"millrace: Redis went back and lost records of job {job.id} that were read: " in log.read_text()


def test_a_refused_cursor_is_exit_1_and_leaves_the_file(redis_url: str, job: Job, tmp_path: Path) -> None:
    with forgotten(job.registry):
        job.write(0, 1)
        with BatchClient(redis_url) as client:
            read(results := client.results(job.id))
    job.write(3, 2, 1, 0)
    output = tmp_path / "out.jsonl"
    output.write_text("kept")
    for cursor, code in ((results.cursor, 1), ("5", 1), ("4x", 2), ("2", 0)):
        command = ["results", job.id, "--cursor", cursor, "--redis-url", redis_url, "-o", str(output)]
        done = CliRunner().invoke(cli, command)
        assert done.exit_code == code, done.output
        assert (output.read_text() == "kept") is (code != 0)
        if code == 1:
            assert "read all results once more, from cursor 0" in done.stderr
