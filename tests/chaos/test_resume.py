"""Long generations whose worker is killed go on, not over."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.chaos.jobs import Record, check_counters, check_records, contents
from tests.chaos.real_engines import read_count
from tests.support.processes import WarmProcess, wait_until, warm_interpreter
from tests.support.request_lines import read_records
from tests.support.workers import QUICK, millrace
from worker.client import BatchClient
from worker.registry.keys import Keys

STOP_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = 250.0  # for a busy machine

Start = Callable[..., tuple[WarmProcess, Path]]


@dataclass
class Load:
    """A job of long generations, and the records of an undisturbed run."""

    model: Path
    num_prompts: int
    num_tokens: int  # of each
    checkpoint_tokens: int
    expected: Mapping[str, Record] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.num_prompts * self.num_tokens

    @property
    def settings(self) -> dict[str, str]:
        return {"model.path": str(self.model), "engine.num_threads": "1", "engine.deterministic": "true"}

    def lines(self) -> list[dict[str, Any]]:
        """Greedy, seeded, with penalties, and two completions of one prompt."""
        kinds: list[dict[str, Any]] = [
            {"temperature": 0},
            {"temperature": 0.8, "seed": 5},
            {"temperature": 0.7, "seed": 9, "frequency_penalty": 0.3, "return_token_ids": True},
        ]
        common = {"max_tokens": self.num_tokens, "ignore_eos": True}
        return [
            {
                "custom_id": f"p{index}",
                "prompt": f"Tell me about {index}.",
                **common,
                **kinds[index % len(kinds)],
            }
            for index in range(self.num_prompts)
        ]

    def run_undisturbed(self) -> None:
        source, output = (self.model.with_name(name) for name in ("lines.jsonl", "records.jsonl"))
        source.write_text("".join(json.dumps(line) + "\n" for line in self.lines()))
        options = [word for key, value in self.settings.items() for word in ("--set", f"{key}={value}")]
        done = millrace("run", "-i", source, "-o", output, "--overwrite", *options, timeout_s=FINISH_TIMEOUT_S)
        assert done.returncode == 0, done.stderr.decode()
        self.expected = contents(read_records(output))


@pytest.fixture
def start(redis_url: str, tmp_path: Path) -> Iterator[Start]:
    """Starts workers that count their tokens, each in a file; none outlives the test."""
    processes: list[WarmProcess] = []

    def start(load: Load, most_tokens: float, **settings: str) -> tuple[WarmProcess, Path]:
        count = tmp_path / f"count-{len(processes)}"
        values = {"redis.url": redis_url, **QUICK, "worker.shard_size": "100", **load.settings}
        values["engine.checkpoint_tokens"] = str(load.checkpoint_tokens)
        values |= {name.replace("__", "."): value for name, value in settings.items()}
        arguments = [f"{key}={value}" for key, value in values.items()]
        with (tmp_path / f"log-{len(processes)}").open("wb") as log:
            process = warm_interpreter().start(
                "tests.chaos.real_engines", [str(count), str(round(most_tokens)), *arguments], log
            )
        processes.append(process)
        return process, count

    yield start
    for process in processes:
        process.kill()
        process.wait(STOP_TIMEOUT_S)


def _end_first_worker(
    client: BatchClient, start: Start, load: Load, share: float, end: signal.Signals, **settings: str
) -> tuple[str, int]:
    """Send `end` to the first worker once it has generated `share` of the tokens; the job, and the tokens by then."""
    first, count = start(load, share * load.total, **settings)
    wait_until(lambda: len(client.workers()) == 1, timeout_s=60)
    job_id = client.submit(load.lines())
    wait_until(lambda: read_count(count) >= share * load.total, timeout_s=FINISH_TIMEOUT_S)
    first.send_signal(end)
    first.wait(STOP_TIMEOUT_S)
    assert not client.status(job_id).status.is_terminal
    return job_id, read_count(count)


def _finish(client: BatchClient, bare: redis.Redis, start: Start, load: Load, job_id: str, **settings: str) -> int:
    """Have a second worker end the job, compare every byte, and return how many tokens that worker generated."""
    second, count = start(load, load.total, **settings)
    client.wait(job_id, timeout_s=FINISH_TIMEOUT_S)
    check_records(client, bare, job_id, num_prompts=load.num_prompts)
    assert contents(client.results(job_id)) == load.expected
    usage = client.status(job_id).usage
    assert usage.output_tokens == load.total
    second.terminate()
    assert second.wait(STOP_TIMEOUT_S) == 0
    check_counters(bare)
    assert bare.zcard(Keys().open) == 0
    assert not bare.exists(Keys().resume_states(job_id), Keys().lines(job_id))
    assert usage.resumed_tokens == load.total - read_count(count)  # no prompt has a record yet
    return read_count(count)


@pytest.fixture(scope="module")
def short_load(tiny_model: Path) -> Load:
    load = Load(tiny_model, num_prompts=9, num_tokens=100, checkpoint_tokens=8)
    load.run_undisturbed()
    return load


@pytest.fixture(scope="module")
def long_load(tiny_model: Path) -> Load:
    load = Load(tiny_model, num_prompts=24, num_tokens=600, checkpoint_tokens=32)
    load.run_undisturbed()
    return load


def test_a_killed_worker_costs_the_tokens_since_the_last_resume_states(
    client: BatchClient, bare: redis.Redis, start: Start, short_load: Load
) -> None:
    job_id, before = _end_first_worker(client, start, short_load, 0.5, signal.SIGKILL)
    recomputed = before + _finish(client, bare, start, short_load, job_id) - short_load.total
    assert 0 <= recomputed <= 0.1 * short_load.total  # those of step 48 may not be kept yet: then it is a tenth


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_a_worker_that_drains_loses_no_token(
    client: BatchClient, bare: redis.Redis, start: Start, long_load: Load
) -> None:
    # None is due within 600 tokens: only the resume states that a worker writes when it ends can have saved them.
    job_id, before = _end_first_worker(
        client, start, long_load, 0.5, signal.SIGTERM, engine__checkpoint_tokens="1000", worker__drain_timeout_s="0.1"
    )
    assert _finish(client, bare, start, long_load, job_id) + before == long_load.total


@pytest.mark.chaos
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
@pytest.mark.timeout(900)
def test_kill_9_of_long_generations_recomputes_less_than_a_tenth(
    client: BatchClient, bare: redis.Redis, start: Start, long_load: Load, share: float
) -> None:
    job_id, before = _end_first_worker(client, start, long_load, share, signal.SIGKILL)
    after = _finish(client, bare, start, long_load, job_id)
    recomputed = before + after - long_load.total
    print(f"killed at {share:.0%}: {before} + {after} tokens generated, {recomputed / long_load.total:.1%} twice")
    assert 0 <= recomputed < 0.1 * long_load.total


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_kill_9_without_resume_states_recomputes_all_of_it(
    client: BatchClient, bare: redis.Redis, start: Start, long_load: Load
) -> None:
    off = {"engine__checkpoint_tokens": "none"}
    job_id, before = _end_first_worker(client, start, long_load, 0.5, signal.SIGKILL, **off)
    after = _finish(client, bare, start, long_load, job_id, **off)
    recomputed = before + after - long_load.total
    print(f"killed at 50%, no resume states: {before} + {after} tokens, {recomputed / long_load.total:.1%} twice")
    assert recomputed == before
