"""Serves a worker's figures to Prometheus, and whether it takes work and why not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from engine.stats import EngineStats
from settings import WorkerSettings
from worker.metrics.catalogue import METRICS, UNITS, Metric
from worker.metrics.figures import Figure, plain_family, queue_figures
from worker.runtime.counts import EngineMeter, QueueReader, StepHistogram, UnitCounts
from worker.runtime.engine_thread import EngineThread
from worker.runtime.held_units import HeldUnits
from worker.runtime.lease_keeper import LeaseKeeper
from worker.runtime.supervision import Activity, Phase, SupervisedThread, Watchdog
from worker.runtime.writer import ResultWriter
from worker.schemas import WorkerInfo

# A part that should move every second or so is late after this. Celery's loop stands still for 10 s when Redis does
# (redis.socket_timeout_s).
LATE_S = 15.0

WorkerFigure = Figure | StepHistogram


@dataclass(frozen=True, slots=True)
class WatchedWorker:
    """The parts of a worker that metrics and health ask, from any thread; each answers at once."""

    settings: WorkerSettings
    describe: Callable[[], WorkerInfo]
    phase: Callable[[], Phase]
    activity: Activity
    engine: EngineThread
    meter: EngineMeter
    held_units: HeldUnits
    keeper: LeaseKeeper
    counts: UnitCounts
    writer: ResultWriter
    watchdog: Watchdog
    reader: QueueReader
    threads: Sequence[SupervisedThread]  # all of them, the reader's and the watchdog's too


class WorkerHealth:
    """Judges whether the worker takes work by what moves in it, which needs no work to be there.

    Every second Celery's loop turns and asks Redis for messages, and an idle engine looks for work; each thread comes
    round in its own time.
    """

    def __init__(self, worker: WatchedWorker) -> None:
        self._worker = worker

    def reasons(self) -> list[str]:
        """Why the worker takes no work; empty if it does."""
        worker = self._worker
        phase = worker.phase()
        if phase != "up":
            return [phase]
        found = [f"{part} is {late_s:.0f} s late" for part, late_s in self.overdue().items() if late_s >= LATE_S]
        if worker.activity.num_ticks == 0:
            found.append("Celery has not begun to take messages")
        if not worker.reader.has_answered:
            found.append("Redis does not answer")
        if worker.keeper.overdue_s >= LATE_S:
            found.append(f"Redis has taken no heartbeat for {worker.keeper.overdue_s:.0f} s: is it full?")
        if worker.watchdog.untaken_s >= LATE_S:
            found.append(f"messages wait, threads are free and none was taken for {worker.watchdog.untaken_s:.0f} s")
        if worker.engine.stalled_for_s >= worker.settings.hang_timeout_s:
            found.append(f"a step of the engine has been running for {worker.engine.stalled_for_s:.0f} s")
        return found

    def overdue(self) -> Mapping[str, float]:
        """Seconds by which each part is past its time. A step of the engine may take as long as it likes.

        Empty while the worker starts or stops, as its parts do so one by one.
        """
        worker = self._worker
        if worker.phase() != "up":
            return {}
        return {
            "consumer": max(worker.activity.tick_overdue_s, worker.activity.answer_overdue_s),
            "engine": worker.engine.idle_overdue_s,
            **{thread.name: thread.overdue_s for thread in worker.threads},
        }


class WorkerCollector(Collector):
    """Gathers every figure at once, but the engine's before it is loaded and the queue's while Redis is away."""

    def __init__(self, worker: WatchedWorker, health: WorkerHealth) -> None:
        self._worker = worker
        self._health = health

    def describe(self) -> list[Family]:
        """Nothing: the registry asks on registration, before there is anything to gather."""
        return []

    def collect(self) -> Iterator[Family]:
        """Every metric of the catalogue that is known, in its order."""
        figures = worker_figures(self._worker, self._health)
        reading = self._worker.reader.latest
        if reading is not None:
            figures |= queue_figures(reading)
        for metric in METRICS:
            if metric.name in figures:
                yield family(metric, figures[metric.name])


def worker_figures(worker: WatchedWorker, health: WorkerHealth) -> dict[str, WorkerFigure]:
    """Figures of the process, and of its engine once that is loaded."""
    tokens, (num_items, num_bytes) = worker.counts.tokens, worker.writer.waiting
    held = Counter(unit.claim.ref.kind for unit in worker.held_units.all())
    figures: dict[str, WorkerFigure] = {
        "millrace_healthy": not health.reasons(),
        "millrace_draining": worker.phase() == "draining",
        "millrace_part_overdue_seconds": health.overdue(),
        "millrace_redis_up": worker.reader.has_answered,
        "millrace_prompts_total": dict(worker.counts.prompts),
        "millrace_prompt_tokens_total": tokens["prompt"],
        "millrace_cached_tokens_total": tokens["cached"],
        "millrace_output_tokens_total": tokens["output"],
        "millrace_resumed_tokens_total": tokens["resumed"],
        "millrace_reasoning_tokens_total": tokens["reasoning"],
        "millrace_attempts_total": dict(worker.counts.attempts),
        "millrace_units_total": dict(worker.counts.ends),
        "millrace_held_units": {unit: held[unit] for unit in UNITS},
        "millrace_shard_slots": worker.settings.concurrency,
        "millrace_open_requests": worker.engine.num_open_requests,
        "millrace_unwritten_items": num_items,
        "millrace_unwritten_bytes": num_bytes,
    }
    stats = worker.meter.stats
    if stats is None:
        return figures
    info = worker.describe()
    labels: dict[tuple[str, ...], float] = {(info.id, info.version, info.model, stats.device, stats.dtype): 1}
    figures["millrace_worker_info"] = labels
    return figures | _engine_figures(worker, stats)


def _engine_figures(worker: WatchedWorker, stats: EngineStats) -> dict[str, WorkerFigure]:
    meter, cache, graphs = worker.meter, stats.prefix_cache, stats.decode_graphs
    return {
        "millrace_engine_steps_total": stats.num_steps,
        "millrace_engine_step_seconds": meter.step_seconds,
        "millrace_engine_step_sequences": meter.step_sequences,
        "millrace_engine_step_tokens": meter.step_tokens,
        "millrace_engine_stalled_seconds": worker.engine.stalled_for_s,
        "millrace_engine_running_sequences": stats.num_running,
        "millrace_engine_waiting_sequences": stats.num_waiting,
        "millrace_engine_preemptions_total": stats.num_preemptions,
        "millrace_engine_kv_blocks": max(stats.num_blocks - 1, 0),  # less the null block
        "millrace_engine_free_kv_blocks": stats.num_free_blocks,
        "millrace_engine_generated_tokens_total": stats.generated_tokens,
        "millrace_engine_drafted_tokens_total": stats.drafted_tokens,
        "millrace_engine_accepted_tokens_total": stats.accepted_tokens,
        "millrace_engine_finished_requests_total": stats.num_finished_requests,
        "millrace_engine_duplicate_requests_total": stats.num_duplicates,
        "millrace_engine_prefix_queried_tokens_total": cache.queried_tokens if cache else 0,
        "millrace_engine_prefix_hit_tokens_total": cache.saved_prefill_tokens if cache else 0,
        "millrace_engine_prefix_evicted_blocks_total": cache.evictions if cache else 0,
        "millrace_engine_graph_replays_total": graphs.num_replays if graphs else 0,
        "millrace_engine_eager_decode_steps_total": graphs.num_eager_decode_steps if graphs else 0,
        "millrace_engine_captured_graphs": len(graphs.captured_sizes) if graphs else 0,
        "millrace_engine_failed_graphs": len(graphs.failed_sizes) if graphs else 0,
    }


def family(metric: Metric, figure: WorkerFigure) -> Family:
    """A metric with its present figure, a histogram too, in prometheus_client's types."""
    if not isinstance(figure, StepHistogram):
        return plain_family(metric, figure)
    histogram = HistogramMetricFamily(metric.name, metric.help)
    histogram.add_metric([], buckets=list(figure.buckets()), sum_value=figure.sum)
    return histogram
