"""Right answers under kill -9, and with `engine.deterministic` the same bits in any batch."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.chaos.fleet import running_fleet
from tests.chaos.jobs import check_invariants, check_nothing_is_left, check_records, contents
from tests.chaos.real_engines import SIZES, Run, differing, make_requests, run
from tests.chaos.worker_program import WorkerOptions
from tests.support.engines import load_engine
from tests.support.processes import wait_until
from tests.support.request_lines import CHECKPOINT, GOAL, run_lines, ticket_lines
from tests.support.tensors import needs_vnni
from tests.support.tiny_checkpoint import VOCAB_SIZE, make_checkpoint
from tests.support.tiny_families import Family
from worker.client import BatchClient
from worker.demo.tickets import GradedAnswers, answer_text, numbered_tickets
from worker.records.record import encode_record

TIMEOUT_S = 100.0
ENGINE = {"engine.deterministic": "true", "engine.num_threads": "1", "engine.dtype": "float32"}
# Each setting that makes batches faster, at its default and the other way.
VARIANTS = [
    pytest.param({}, id="as shipped"),
    pytest.param({"engine.shared_prefix.enabled": "false"}, id="every row reads its own prefix"),
    pytest.param({"engine.deduplicate": "false"}, id="every duplicate is computed"),
    pytest.param({"engine.quantization": "int8"}, id="weights of 8 bits", marks=needs_vnni),
]

FAMILIES: list[Family] = ["llama", "qwen3", "qwen3_moe"]
DTYPES = ["float32", "bfloat16"]


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_tickets_are_answered_right_though_their_worker_is_killed_twice(
    client: BatchClient, bare: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    tickets = numbered_tickets(seed=4, count=300)
    engine = load_engine(CHECKPOINT, ENGINE)
    expected = contents(run_lines(engine, ticket_lines(tickets)))
    engine.close()
    with running_fleet(redis_url, tmp_path, WorkerOptions(), {**ENGINE, "model.path": str(CHECKPOINT)}) as fleet:
        worker = fleet.start()
        fleet.wait_up(client)
        job_id = client.submit(ticket_lines(tickets))
        for num_finished in (75, 190):
            wait_until(partial(_has_finished, client, job_id, num_finished), timeout_s=TIMEOUT_S)
            worker.kill()
        client.wait(job_id, timeout_s=TIMEOUT_S)
        check_invariants(client, bare, {job_id: expected})
        graded = GradedAnswers.of_records(tickets, client.results(job_id))
        assert fleet.stop() == [0]
    assert worker.exit_codes == [-9, -9]
    assert graded.accuracy >= GOAL, graded.wrong


@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.parametrize("variant", VARIANTS)
def test_tickets_and_duplicates_are_right_whatever_is_shared_or_rounded(
    client: BatchClient, bare: redis.Redis, redis_url: str, tmp_path: Path, variant: dict[str, str]
) -> None:
    tickets = numbered_tickets(seed=4, count=300)
    again = {f"again-{name}": ticket for name, ticket in list(tickets.items())[::4]}
    lines = sorted(ticket_lines(tickets | again), key=lambda line: str(line["body"]["messages"]))  # duplicates meet
    settings = {"engine.num_threads": "1", "model.path": str(CHECKPOINT), **variant}
    with running_fleet(redis_url, tmp_path, WorkerOptions(), settings) as fleet:
        worker = fleet.start()
        fleet.wait_up(client)
        job_id = client.submit(lines)
        wait_until(partial(_has_finished, client, job_id, 90), timeout_s=TIMEOUT_S)
        worker.kill()
        client.wait(job_id, timeout_s=TIMEOUT_S)
        check_records(client, bare, job_id, num_prompts=len(lines))
        check_nothing_is_left(bare)
        records = list(client.results(job_id))
        assert fleet.stop() == [0]
    assert worker.exit_codes == [-9]
    graded = GradedAnswers.of_records(tickets, records)
    assert graded.accuracy >= GOAL, graded.wrong
    answers = {record["custom_id"]: answer_text(record) for record in records}
    different = [name for name in again if answers[name] != answers[name.removeprefix("again-")]]
    # In other steps sums are rounded in another order: one choice in a thousand may differ.
    assert len(different) <= 1, different


def _lines(kind: str, count: int) -> list[dict[str, Any]]:
    """Lines of one endpoint whose answers are long: embeddings of two inputs, tickets by schema, or three choices."""
    if kind == "grammar":
        return ticket_lines(numbered_tickets(seed=5, count=count))
    bodies: list[dict[str, Any]]
    texts = [f"{name} of {number}" for number, name in enumerate(numbered_tickets(seed=5, count=count))]
    if kind == "embeddings":
        url, bodies = "/v1/embeddings", [{"input": [text, f"{text}, again"]} for text in texts]
    else:
        url, asked = "/v1/completions", {"n": 3, "logprobs": 5, "max_tokens": 16, "temperature": 0.9}
        bodies = [{"prompt": text, "seed": number, **asked} for number, text in enumerate(texts)]
    return [
        {"custom_id": f"{kind}-{number}", "method": "POST", "url": url, "body": body}
        for number, body in enumerate(bodies)
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("choices with logprobs", 12),
        *[pytest.param(*asked, marks=pytest.mark.chaos) for asked in (("embeddings", 200), ("grammar", 100))],
    ],
)
def test_records_of_every_kind_are_the_same_after_their_worker_was_killed(
    kind: str, count: int, client: BatchClient, bare: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    lines = _lines(kind, count)
    engine = load_engine(CHECKPOINT, ENGINE)
    # As they are written: embeddings have nine digits then.
    expected = contents(json.loads(encode_record(record)) for record in run_lines(engine, lines))
    engine.close()
    assert not [record for record in expected.values() if record["error"] is not None]
    settings = {**ENGINE, "model.path": str(CHECKPOINT), "worker.shard_size": "6"}
    with running_fleet(redis_url, tmp_path, WorkerOptions(), settings) as fleet:
        worker = fleet.start(die_at="after put before ack")  # of the first shard
        fleet.wait_up(client)
        job_id = client.submit(lines)
        client.wait(job_id, timeout_s=TIMEOUT_S)
        check_invariants(client, bare, {job_id: expected})
        assert fleet.stop() == [0]
    assert worker.exit_codes == [-9]


def _has_finished(client: BatchClient, job_id: str, count: int) -> bool:
    return client.status(job_id).request_counts.finished >= count


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[Family, Path]:
    return {family: make_checkpoint(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


def shuffled_runs(path: Path, dtype: str, *, count: int, num_runs: int, deterministic: bool) -> list[Run]:
    requests = make_requests(count, VOCAB_SIZE)
    common = {"dtype": dtype, "deterministic": str(deterministic).lower()}
    runs = [run(path, requests, common | dict(size), shuffle=index) for index, size in enumerate(SIZES[:num_runs])]
    assert runs[0].num_preemptions == 0
    assert sum(run.num_preemptions for run in runs) > 0
    assert sum(run.cached_tokens for run in runs) > 0
    return runs


def test_forty_requests_in_three_runs(checkpoints: dict[Family, Path]) -> None:
    runs = shuffled_runs(checkpoints["qwen3_moe"], "bfloat16", count=40, num_runs=3, deterministic=True)
    assert differing(runs) == (0, 0)


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_five_hundred_requests_in_five_runs(
    checkpoints: dict[Family, Path], family: Family, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = shuffled_runs(checkpoints[family], dtype, count=500, num_runs=5, deterministic=True)
    report(capsys, f"{family} {dtype}, deterministic", runs)
    assert differing(runs) == (0, 0)


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_without_it_the_same_requests_differ(
    checkpoints: dict[Family, Path], family: Family, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = shuffled_runs(checkpoints[family], dtype, count=500, num_runs=5, deterministic=False)
    report(capsys, f"{family} {dtype}, not deterministic", runs)
    assert differing(runs)[0] > 0, "a comparison that finds no difference here proves nothing there"


def report(capsys: pytest.CaptureFixture[str], name: str, runs: list[Run]) -> None:
    logits, tokens = differing(runs)
    positions = sum(map(len, runs[0].logits.values()))
    with capsys.disabled():
        print(
            f"\n{name}: of {len(runs[0].tokens)} requests ({positions} tokens) in {len(runs)} runs "
            f"{logits} differ in logits, {tokens} in tokens; "
            f"{sum(run.num_preemptions for run in runs)} preemptions, {sum(run.cached_tokens for run in runs)} cached"
        )
