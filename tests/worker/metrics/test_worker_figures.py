"""Where figures come from that a worker without a GPU does not have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from engine.execution.decode_graphs import DecodeGraphStats
from engine.kv_cache.block_manager import PrefixCacheMetrics
from tests.support.engine_stats import engine_stats
from worker.runtime.counts import EngineMeter, UnitCounts
from worker.runtime.held_units import HeldUnits
from worker.runtime.worker_metrics import Figure, WatchedWorker, WorkerHealth, worker_figures
from worker.schemas import WorkerInfo


def _figures(meter: EngineMeter) -> dict[str, Figure]:
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
