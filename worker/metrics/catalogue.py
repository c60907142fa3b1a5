"""Every metric there is. No label ever holds a prompt, an answer, a job's id or a producer's metadata.

Labels are few and bounded, as Prometheus keeps a series for each value of a label for weeks. `tenant` is of one of the
TOP_TENANTS pairs of tenant and model with the most waiting shards, or OTHER_TENANTS for a model's others of the 200
pairs that have waited longest. That bounds a scrape; tenants that wait briefly one after another still become a series
each. `priority` is 0 .. 9, or UNREAD_PRIORITY. `model` is one that is served, or that jobs wait for; empty for shards
that an older version planned.

Metrics of the queue are read from Redis and the same from every worker and server: take the max over them, never the
sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from worker.registry.lifecycle import Outcome, StopReason

Kind = Literal["counter", "gauge", "histogram"]

TOP_TENANTS = 20
# Neither is a tenant's name or a priority: tenants are of letters, digits, `.`, `_` and `-`.
OTHER_TENANTS = "(other)"
UNREAD_PRIORITY = "(unread)"  # of shards beyond those that one look at the queue reads

# What a label may be.
OUTCOMES = tuple(outcome.value for outcome in Outcome)
UNITS = ("plan", "shard")
ATTEMPTS = ("1", "2", "3+")
UNIT_ENDS = ("finished", *(reason.metric_label for reason in StopReason))
JOB_ENDS = ("completed", "failed", "cancelled", "expired")
LANES = ("0", "3", "6", "9")
PARTS = ("consumer", "engine", "lease-keeper", "result-writer", "reaper", "watchdog", "callbacks", "queue-reader")

STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
STEP_SEQUENCES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
STEP_TOKENS = (1.0, 4.0, 16.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric as it stands in /metrics: its name has the unit, a counter's ends in `_total`."""

    name: str
    kind: Kind
    help: str  # one line
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # a histogram's upper bounds, rising, without +Inf


ENGINE_METRICS = (
    Metric("millrace_engine_steps_total", "counter", "Steps begun."),
    Metric("millrace_engine_step_seconds", "histogram", "Time of a step on the engine's thread.", buckets=STEP_SECONDS),
    Metric(
        "millrace_engine_step_sequences", "histogram", "Sequences in a step, the batch size.", buckets=STEP_SEQUENCES
    ),
    Metric("millrace_engine_step_tokens", "histogram", "Tokens in a step, prefill and decode.", buckets=STEP_TOKENS),
    Metric(
        "millrace_engine_stalled_seconds", "gauge", "How long the step that runs has been running; 0 between steps."
    ),
    Metric("millrace_engine_running_sequences", "gauge", "Sequences that hold KV blocks."),
    Metric("millrace_engine_waiting_sequences", "gauge", "Sequences in the engine that hold none yet."),
    Metric("millrace_engine_preemptions_total", "counter", "Sequences that lost their blocks to others."),
    Metric("millrace_engine_kv_blocks", "gauge", "KV blocks there are, without the null block."),
    Metric(
        "millrace_engine_free_kv_blocks",
        "gauge",
        "KV blocks a sequence could have now, those with cached prefixes included.",
    ),
    Metric(
        "millrace_engine_generated_tokens_total", "counter", "Tokens sampled, as they come, whatever became of them."
    ),
    Metric("millrace_engine_drafted_tokens_total", "counter", "Tokens drafted by engine.speculation, and verified."),
    Metric("millrace_engine_accepted_tokens_total", "counter", "Of these, chosen in the end: steps saved."),
    Metric("millrace_engine_finished_requests_total", "counter", "Requests that ended."),
    Metric(
        "millrace_engine_duplicate_requests_total", "counter", "Of these, given what was generated for an equal one."
    ),
    Metric(
        "millrace_engine_prefix_queried_tokens_total", "counter", "Tokens looked up in the prefix cache on admission."
    ),
    Metric(
        "millrace_engine_prefix_hit_tokens_total", "counter", "Of these, found: divide for the hit rate as it is now."
    ),
    Metric("millrace_engine_prefix_evicted_blocks_total", "counter", "Cached blocks that had to make room."),
    Metric("millrace_engine_graph_replays_total", "counter", "Forward passes replayed from a CUDA graph."),
    Metric("millrace_engine_eager_decode_steps_total", "counter", "Decode steps that had graphs and none that fits."),
    Metric("millrace_engine_captured_graphs", "gauge", "CUDA graphs, one a batch size."),
    Metric("millrace_engine_failed_graphs", "gauge", "Batch sizes whose capture failed."),
)

# Of prometheus_client itself, on Linux.
PROCESS_METRICS = (
    Metric("process_cpu_seconds_total", "counter", "Processor time, user and system."),
    Metric("process_resident_memory_bytes", "gauge", "Resident memory."),
    Metric("process_virtual_memory_bytes", "gauge", "Virtual memory."),
    Metric("process_start_time_seconds", "gauge", "Unix time of its start: a change is a restart."),
    Metric("process_open_fds", "gauge", "Open file descriptors."),
    Metric("process_max_fds", "gauge", "Most file descriptors it may open."),
)

QUEUE_METRICS = (
    Metric("millrace_queue_open_jobs", "gauge", "Jobs accepted and not ended."),
    Metric("millrace_queue_open_prompts", "gauge", "Their prompts without a record."),
    Metric("millrace_queue_open_bytes", "gauge", "Their lines' size in Redis."),
    Metric(
        "millrace_queue_tenant_open_prompts",
        "gauge",
        "Prompts without a record, of tenants that have shards waiting; without the value (other).",
        ("tenant",),
    ),
    Metric(
        "millrace_queue_waiting_shards",
        "gauge",
        "Planned shards that nobody holds; those that crashed a worker are not among them.",
        ("model", "tenant", "priority"),
    ),
    Metric(
        "millrace_queue_oldest_wait_seconds",
        "gauge",
        "How long ago the oldest of these was first queued; without the values (other) and (unread).",
        ("model", "tenant", "priority"),
    ),
    Metric("millrace_queue_waiting_tenants", "gauge", "Tenants that have shards waiting."),
    Metric("millrace_queue_open_units", "gauge", "Plans and shards that are not finished, held or not."),
    Metric(
        "millrace_queue_overdue_seconds",
        "gauge",
        "How long a plan or shard has been due for a look that nobody gave it; some seconds while a worker lives.",
    ),
    Metric(
        "millrace_queue_messages",
        "gauge",
        "Celery messages about shards of a model, or about plans where it is empty, in each lane; 0 is taken first.",
        ("model", "lane"),
    ),
    Metric("millrace_queue_submitted_jobs_total", "counter", "Jobs accepted."),
    Metric("millrace_queue_submitted_prompts_total", "counter", "Their prompts."),
    Metric("millrace_queue_ended_jobs_total", "counter", "Accepted jobs that ended, by how.", ("status",)),
    Metric("millrace_queue_records_total", "counter", "Records written, by all workers and by producers that cancel."),
    Metric(
        "millrace_queue_dead_units",
        "gauge",
        "Plans and prompts given up as worker_lost, of the last week, at most 10,000.",
    ),
    Metric("millrace_queue_dead_frames_total", "counter", "Frames in the queue that were no message (dead letters)."),
    Metric("millrace_queue_waiting_callbacks", "gauge", "Callbacks (on_done) of ended jobs that are not sent yet."),
    Metric("millrace_queue_dead_callbacks", "gauge", "Callbacks given up, of the last week, at most 10,000."),
    Metric("millrace_queue_sent_callbacks_total", "counter", "Callbacks that were sent."),
)

WORKER_METRICS = (
    Metric(
        "millrace_worker_info",
        "gauge",
        "1, with what this worker runs as labels.",
        ("worker", "version", "model", "device", "dtype"),
    ),
    Metric("millrace_healthy", "gauge", "1 while /healthz answers 200, else 0."),
    Metric("millrace_draining", "gauge", "1 while it stops: what runs may finish, nothing more is taken."),
    Metric(
        "millrace_part_overdue_seconds",
        "gauge",
        "How long past its time a part of the worker has not moved; 0 while it is on time.",
        ("part",),
    ),
    Metric("millrace_redis_up", "gauge", "1 if Redis answered this worker's last look at the queue, else 0."),
    Metric(
        "millrace_prompts_total", "counter", "Prompts whose record this worker wrote, by how they ended.", ("outcome",)
    ),
    Metric("millrace_prompt_tokens_total", "counter", "Tokens of those prompts."),
    Metric(
        "millrace_cached_tokens_total",
        "counter",
        "Of these, not computed: found in the prefix cache, or a duplicate's.",
    ),
    Metric("millrace_output_tokens_total", "counter", "Tokens of the answers in those records."),
    Metric("millrace_resumed_tokens_total", "counter", "Of these, taken over from a resume state of another worker."),
    Metric("millrace_reasoning_tokens_total", "counter", "Of the answers' tokens, reasoning."),
    Metric(
        "millrace_attempts_total",
        "counter",
        "Plans and shards claimed, by attempt: from 2 on a worker died or broke over it before.",
        ("unit", "attempt"),
    ),
    Metric(
        "millrace_units_total",
        "counter",
        "Plans and shards this worker let go of, by why; lease_lost: another worker has it, or its job is over; "
        "failed: a defect over this one.",
        ("unit", "end"),
    ),
    Metric("millrace_held_units", "gauge", "Plans and shards this worker holds a lease on.", ("unit",)),
    Metric("millrace_shard_slots", "gauge", "Shards it may hold at once (worker.concurrency)."),
    Metric("millrace_open_requests", "gauge", "Prompts handed to the engine that have no answer yet."),
    Metric("millrace_unwritten_items", "gauge", "Records and resume states that wait for Redis."),
    Metric("millrace_unwritten_bytes", "gauge", "Their size; at 64 MiB, or at 2,000 results, shards wait."),
)

# Of `millrace serve`, which serves the queue's too.
SERVER_METRICS = (
    Metric(
        "millrace_queue_model_open_prompts",
        "gauge",
        "Prompts without a record, by model; empty for jobs that name none until a worker has planned them.",
        ("model",),
    ),
    Metric("millrace_queue_model_waiting_prompts", "gauge", "Of these, those that no worker has.", ("model",)),
    Metric(
        "millrace_queue_model_open_tokens",
        "gauge",
        "Tokens of the open prompts, in and out, estimated: as many a prompt as the job's with a record had, "
        "before these one for 4 bytes of its lines.",
        ("model",),
    ),
    Metric(
        "millrace_queue_model_waiting_tokens", "gauge", "Of these, those of prompts that no worker has.", ("model",)
    ),
    Metric(
        "millrace_queue_model_oldest_wait_seconds",
        "gauge",
        "How long ago the oldest of those that wait was submitted, or its shard first queued; 0 if none waits.",
        ("model",),
    ),
    Metric("millrace_queue_unread_units", "gauge", "1 if there are more plans and shards than these figures are of."),
    Metric(
        "millrace_http_requests_total",
        "counter",
        "Requests answered by this server, by route; a download counts when it begins.",
        ("method", "route", "status"),
    ),
    Metric("millrace_http_uploaded_bytes_total", "counter", "Bytes of bodies of uploads, whatever became of them."),
    Metric("millrace_http_open_uploads", "gauge", "Uploads under way."),
)

METRICS = (*WORKER_METRICS, *ENGINE_METRICS, *QUEUE_METRICS, *PROCESS_METRICS)
