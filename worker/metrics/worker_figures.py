"""The figures of a worker, by the names of the catalogue."""

from __future__ import annotations

from collections import Counter

from engine.engine import EngineStats
from worker.metrics.catalogue import OTHER_TENANTS, UNITS, UNREAD_PRIORITY
from worker.metrics.families import Figure
from worker.metrics.watched_worker import WatchedWorker
from worker.metrics.worker_health import WorkerHealth
from worker.registry.queue_reading import QueueReading


def worker_figures(worker: WatchedWorker, health: WorkerHealth) -> dict[str, Figure]:
    """Of the process, and of its engine once that is loaded."""
    tokens, (num_items, num_bytes) = worker.counts.tokens, worker.writer.waiting
    held = Counter("plan" if unit.claim.ref.is_plan else "shard" for unit in worker.held_units.all())
    figures: dict[str, Figure] = {
        "millrace_healthy": not health.reasons(),
        "millrace_draining": worker.phase() == "draining",
        "millrace_part_overdue_seconds": health.overdue(),
        "millrace_redis_up": worker.reader.has_answered,
        "millrace_prompts_total": worker.counts.prompts,
        "millrace_prompt_tokens_total": tokens["prompt"],
        "millrace_cached_tokens_total": tokens["cached"],
        "millrace_output_tokens_total": tokens["output"],
        "millrace_resumed_tokens_total": tokens["resumed"],
        "millrace_reasoning_tokens_total": tokens["reasoning"],
        "millrace_attempts_total": worker.counts.attempts,
        "millrace_units_total": worker.counts.ends,
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


def _engine_figures(worker: WatchedWorker, stats: EngineStats) -> dict[str, Figure]:
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


def queue_figures(reading: QueueReading) -> dict[str, Figure]:
    """Of the queue, the same from every worker."""
    waiting: dict[tuple[str, str], float] = {}
    oldest: dict[tuple[str, str], float] = {}
    for backlog in reading.backlogs:
        for priority, (count, oldest_s) in backlog.waiting.items():
            waiting[backlog.tenant, str(priority)] = count
            oldest[backlog.tenant, str(priority)] = oldest_s
        if backlog.num_unread:
            waiting[backlog.tenant, UNREAD_PRIORITY] = backlog.num_unread
    if reading.other_waiting_shards:
        waiting[OTHER_TENANTS, UNREAD_PRIORITY] = reading.other_waiting_shards
    return {
        "millrace_queue_open_jobs": reading.open_jobs,
        "millrace_queue_open_prompts": reading.open_prompts,
        "millrace_queue_open_bytes": reading.open_bytes,
        "millrace_queue_tenant_open_prompts": {item.tenant: item.open_prompts for item in reading.backlogs},
        "millrace_queue_waiting_shards": waiting,
        "millrace_queue_oldest_wait_seconds": oldest,
        "millrace_queue_waiting_tenants": reading.num_waiting_tenants,
        "millrace_queue_open_units": reading.open_units,
        "millrace_queue_overdue_seconds": reading.overdue_s,
        "millrace_queue_messages": {str(step): count for step, count in reading.messages.items()},
        "millrace_queue_submitted_jobs_total": reading.submitted_jobs,
        "millrace_queue_submitted_prompts_total": reading.submitted_prompts,
        "millrace_queue_ended_jobs_total": reading.ended_jobs,
        "millrace_queue_records_total": reading.num_records,
        "millrace_queue_dead_units": reading.num_dead_units,
        "millrace_queue_dead_frames_total": reading.num_dead_frames,
    }
