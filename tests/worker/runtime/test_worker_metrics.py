"""A real worker's /metrics and /healthz, asked over HTTP, and its figures where there is no GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from engine.stats import DecodeGraphStats, PrefixCacheMetrics
from tests.support.fake_engine import FAIL, engine_stats
from tests.support.monitoring import get, health, scrape
from tests.support.processes import wait_until
from tests.support.redis_servers import free_port, restartable_redis
from tests.support.workers import (
    FAKE_WORKER_STOP_TIMEOUT_S,
    WorkerProcesses,
    millrace,
    running_workers,
    worker_processes,
)
from worker.client import BatchClient
from worker.metrics.catalogue import METRICS, PARTS
from worker.runtime.counts import EngineMeter, UnitCounts
from worker.runtime.held_units import HeldUnits
from worker.runtime.worker_metrics import WatchedWorker, WorkerFigure, WorkerHealth, worker_figures
from worker.schemas import JobState, WorkerInfo

WAIT_S = 20.0
SECRET = "correct horse battery staple"


def _start(workers: WorkerProcesses, **options: object) -> int:
    """A worker that serves metrics; its port."""
    port = free_port()
    workers.start(metrics__port=str(port), metrics__queue_interval_s="1", **options)  # type: ignore[arg-type]  # both kinds
    wait_until(lambda: _is_up(port), timeout_s=WAIT_S)
    return port


def _is_up(port: int) -> bool:
    try:
        return health(port) == (200, [])
    except OSError:
        return False


def test_a_small_job_is_counted_exactly(client: BatchClient, workers: WorkerProcesses) -> None:
    port = _start(workers, worker__lease_s="30")
    good = [{"prompt": f"{SECRET} {number}"} for number in range(22)]
    job_id = client.submit([*good, {"prompt": FAIL}, {"model": SECRET}], tenant="a-tenant", metadata={"note": SECRET})
    assert client.wait(job_id, WAIT_S).status is JobState.COMPLETED
    wait_until(lambda: scrape(port).get("millrace_queue_records_total") == 24, timeout_s=WAIT_S)
    found = scrape(port)
    assert {name: value for name, value in found.items() if name.startswith("millrace_prompts_total")} == {
        f'millrace_prompts_total{{outcome="{outcome}"}}': count
        for outcome, count in {"ok": 22, "error": 2, "cancelled": 0, "expired": 0, "lost": 0}.items()
    }
    usage = client.status(job_id).usage
    expected = {
        "millrace_prompt_tokens_total": usage.input_tokens,
        "millrace_cached_tokens_total": 22,  # the fake engine finds one of each prompt
        "millrace_output_tokens_total": 16 * 22,  # its answers are 16 bytes long
        'millrace_attempts_total{attempt="1",unit="plan"}': 1,
        'millrace_attempts_total{attempt="1",unit="shard"}': 3,
        'millrace_units_total{end="finished",unit="plan"}': 1,
        'millrace_units_total{end="finished",unit="shard"}': 3,
        'millrace_units_total{end="lease_lost",unit="shard"}': 0,
        "millrace_shard_slots": 4,
        "millrace_engine_step_sequences_sum": 23,
        "millrace_queue_submitted_jobs_total": 1,
        "millrace_queue_submitted_prompts_total": 24,
        'millrace_queue_ended_jobs_total{status="completed"}': 1,
        "millrace_queue_open_jobs": 0,
        "millrace_healthy": 1,
        "millrace_draining": 0,
        "millrace_redis_up": 1,
    }
    assert {name: found[name] for name in expected} == expected
    assert found["millrace_engine_step_seconds_count"] == found["millrace_engine_steps_total"] >= 3
    text = get(port, "/metrics")[1]
    assert SECRET not in text
    assert job_id not in text


def test_what_is_declared_is_served_and_nothing_else(
    client: BatchClient, workers: WorkerProcesses, tmp_path: Path
) -> None:
    engine = {"step_s": 0.05, "slots": 1, "gate": str(tmp_path / "never")}  # it stays in its first shard
    port = _start(workers, engine=engine, worker__concurrency="1", worker__lease_s="30")
    workers.wait_up(client)
    client.submit([{"prompt": f"prompt {number}"} for number in range(200)], tenant="a-tenant", priority=7)
    waiting = 'millrace_queue_waiting_shards{model="millrace",priority="7",tenant="a-tenant"}'
    wait_until(lambda: scrape(port).get(waiting) == 19, timeout_s=WAIT_S)
    text = get(port, "/metrics")[1]
    kinds = dict(line.split()[2:] for line in text.splitlines() if line.startswith("# TYPE"))
    assert kinds == {metric.name: metric.kind for metric in METRICS}
    found = scrape(port)
    assert found[waiting] == 19
    assert 0 <= found['millrace_queue_oldest_wait_seconds{model="millrace",priority="7",tenant="a-tenant"}'] < WAIT_S
    assert 100 < found['millrace_queue_tenant_open_prompts{tenant="a-tenant"}'] <= 200
    assert found['millrace_held_units{unit="shard"}'] == 1
    assert found["millrace_open_requests"] > 0
    labels = {metric.name: set(metric.labels) for metric in METRICS}
    for name in found:
        base, _, rest = name.partition("{")
        names = {item.split("=")[0] for item in rest.rstrip("}").split(",") if item}
        assert base.endswith(("_bucket", "_count", "_sum")) or names == labels[base], name


def test_a_worker_that_drains_says_so(client: BatchClient, workers: WorkerProcesses, tmp_path: Path) -> None:
    port, gate = free_port(), tmp_path / "gate"
    engine = {"step_s": 0.01, "slots": 1, "answers_before_gate": 1, "gate": str(gate)}
    options = {"worker__lease_s": "30", "worker__drain_timeout_s": "30"}
    worker = workers.start(engine=engine, metrics__port=str(port), **options)
    workers.wait_up(client)
    job_id = client.submit([{"prompt": f"prompt {number}"} for number in range(10)])
    wait_until(lambda: client.status(job_id).request_counts.completed > 0)
    worker.terminate()
    wait_until(lambda: health(port) == (503, ["draining"]))
    assert scrape(port)["millrace_draining"] == 1
    gate.touch()
    assert worker.wait(FAKE_WORKER_STOP_TIMEOUT_S) == 0
    assert client.status(job_id).status is JobState.COMPLETED


def test_a_worker_whose_engine_hangs_is_unhealthy_until_it_ends(client: BatchClient, workers: WorkerProcesses) -> None:
    port = _start(workers, engine={"step_s": 600}, worker__hang_timeout_s="1", worker__drain_timeout_s="0")
    answers = []

    def is_unhealthy() -> bool:  # one answer has both: when the next is asked for, the worker may have ended
        answers.append(health(port))
        return answers[-1][0] == 503

    client.submit([{"prompt": "prompt"}])
    wait_until(is_unhealthy)
    reasons = answers[-1][1]
    assert reasons in (["failed"], ["draining"]) or reasons[0].startswith("a step of the engine has been running for")


def test_a_worker_without_its_redis_is_unhealthy_until_that_is_back(tmp_path: Path) -> None:
    with restartable_redis(tmp_path, is_durable=False) as server, worker_processes(server.url, tmp_path) as workers:
        port = _start(workers, limits__callback_queues="done")  # all of its parts

        def overdue_s(part: str) -> float:
            return scrape(port)[f'millrace_part_overdue_seconds{{part="{part}"}}']

        wait_until(lambda: all(overdue_s(part) < 1 for part in PARTS))
        server.kill()
        wait_until(lambda: "Redis does not answer" in health(port)[1], timeout_s=WAIT_S)
        wait_until(lambda: overdue_s("consumer") > 1)
        assert health(port)[0] == 503
        gone = scrape(port)
        assert gone["millrace_redis_up"] == gone["millrace_healthy"] == 0
        assert not [name for name in gone if name.startswith("millrace_queue_")]  # they would be old
        server.start()
        wait_until(lambda: _is_up(port), timeout_s=WAIT_S)


def test_a_port_in_use_is_said_before_the_model_is_loaded(redis_url: str, workers: WorkerProcesses) -> None:
    port = _start(workers)
    second = millrace("worker", "--redis-url", redis_url, "--model", "/nowhere", "--set", f"metrics.port={port}")
    assert second.returncode == 2
    assert f"metrics.port={port}: another program, perhaps another worker, has this port" in second.stderr.decode()


def test_the_engines_own_figures_of_a_job_whose_prompts_share_a_prefix(
    client: BatchClient, redis_url: str, tiny_model: Path
) -> None:
    port = free_port()
    body = {"max_tokens": 4, "ignore_eos": True, "temperature": 0}
    lines = [{"prompt": [*range(10, 42), last], **body} for last in range(50, 54)]  # two shared blocks of 16
    with running_workers(redis_url, tiny_model, 1, "--set", f"metrics.port={port}"):
        job_id = client.submit(lines)
        usage = client.wait(job_id, WAIT_S).usage
        found = scrape(port)
        info = next(name for name in found if name.startswith("millrace_worker_info"))
    assert (usage.input_tokens, usage.cached_tokens, usage.output_tokens) == (4 * 33, 3 * 32, 4 * 4)
    expected = {
        "millrace_prompt_tokens_total": 4 * 33,
        "millrace_cached_tokens_total": 3 * 32,
        "millrace_output_tokens_total": 4 * 4,
        "millrace_engine_generated_tokens_total": 4 * 4,
        "millrace_engine_drafted_tokens_total": 0,
        "millrace_engine_accepted_tokens_total": 0,
        "millrace_engine_finished_requests_total": 4,
        "millrace_engine_duplicate_requests_total": 0,
        "millrace_engine_prefix_queried_tokens_total": 4 * 33 + 1,  # and the warm-up's
        "millrace_engine_prefix_hit_tokens_total": 3 * 32,
        "millrace_engine_step_tokens_sum": 33 + 3 * 1 + 4 * 3,
        "millrace_engine_preemptions_total": 0,
        "millrace_engine_captured_graphs": 0,
        "millrace_engine_running_sequences": 0,
    }
    assert {name: found[name] for name in expected} == expected
    assert found["millrace_engine_free_kv_blocks"] == found["millrace_engine_kv_blocks"] > 0
    assert 'device="cpu",dtype="float32",model="tiny"' in info


def _figures(meter: EngineMeter) -> dict[str, WorkerFigure]:
    worker: Any = SimpleNamespace(
        settings=SimpleNamespace(concurrency=16),
        describe=lambda: WorkerInfo(id="w", version="1", model="m", steps=0, open_requests=0, held=0),
        phase=lambda: "up",
        engine=SimpleNamespace(num_open_requests=0, stalled_for_s=0.0),
        meter=meter,
        held_units=HeldUnits(),
        counts=UnitCounts(),
        writer=SimpleNamespace(waiting=(3, 400)),
        reader=SimpleNamespace(has_answered=True),
    )
    health: Any = SimpleNamespace(reasons=list, overdue=dict)
    return worker_figures(cast(WatchedWorker, worker), cast(WorkerHealth, health))


def test_before_the_engine_is_loaded_its_figures_are_left_out() -> None:
    figures = _figures(EngineMeter())
    assert not [name for name in figures if name.startswith("millrace_engine_") or name == "millrace_worker_info"]
    assert (figures["millrace_unwritten_items"], figures["millrace_unwritten_bytes"]) == (3, 400)


def test_graphs_and_prefix_cache_are_those_of_the_last_step() -> None:
    meter = EngineMeter()
    cache = PrefixCacheMetrics(True, 9, 8, 700, 600, 5, 4, 3, 2, 16, 1)
    graphs = DecodeGraphStats((1, 2, 4), (8,), num_replays=70, num_eager_decode_steps=6)
    meter.publish(engine_stats(num_blocks=101, num_free_blocks=60, prefix_cache=cache, decode_graphs=graphs))
    expected = {
        "millrace_engine_prefix_queried_tokens_total": 700,
        "millrace_engine_prefix_hit_tokens_total": 600,
        "millrace_engine_prefix_evicted_blocks_total": 5,
        "millrace_engine_graph_replays_total": 70,
        "millrace_engine_eager_decode_steps_total": 6,
        "millrace_engine_captured_graphs": 3,
        "millrace_engine_failed_graphs": 1,
        "millrace_engine_kv_blocks": 100,
        "millrace_engine_free_kv_blocks": 60,
        "millrace_worker_info": {("w", "1", "m", "cpu", "float32"): 1},
    }
    figures = _figures(meter)
    assert {name: figures[name] for name in expected} == expected


def test_an_engine_without_cache_and_graphs_has_noughts() -> None:
    meter = EngineMeter()
    meter.publish(engine_stats())
    figures = _figures(meter)
    assert figures["millrace_engine_prefix_hit_tokens_total"] == figures["millrace_engine_graph_replays_total"] == 0
