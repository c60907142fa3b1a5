"""Gives figures the form that Prometheus reads, and the queue's reading its figures."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family

from worker.metrics.catalogue import OTHER_TENANTS, UNREAD_PRIORITY, Metric
from worker.registry.queues import QueueReading

# A number, or one for each value of the metric's label or labels.
Figure = float | Mapping[str, float] | Mapping[tuple[str, ...], float] | Mapping[tuple[str, str], float]


def queue_figures(reading: QueueReading) -> dict[str, Figure]:
    """Figures of the queue, the same from every worker and server."""
    waiting: dict[tuple[str, ...], float] = {}
    oldest: dict[tuple[str, ...], float] = {}
    for backlog in reading.backlogs:
        whose = (backlog.model, backlog.tenant)
        for priority, (count, oldest_s) in backlog.waiting.items():
            waiting[*whose, str(priority)] = count
            oldest[*whose, str(priority)] = oldest_s
        if backlog.num_unread:
            waiting[*whose, UNREAD_PRIORITY] = backlog.num_unread
    for model, num_shards in reading.other_waiting_shards.items():
        waiting[model, OTHER_TENANTS, UNREAD_PRIORITY] = num_shards
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
        "millrace_queue_messages": {
            (model, str(step)): count for model, lanes in reading.messages.items() for step, count in lanes.items()
        },
        "millrace_queue_submitted_jobs_total": reading.submitted_jobs,
        "millrace_queue_submitted_prompts_total": reading.submitted_prompts,
        "millrace_queue_ended_jobs_total": reading.ended_jobs,
        "millrace_queue_records_total": reading.num_records,
        "millrace_queue_dead_units": reading.num_dead_units,
        "millrace_queue_dead_frames_total": reading.num_dead_frames,
        "millrace_queue_waiting_callbacks": reading.waiting_callbacks,
        "millrace_queue_dead_callbacks": reading.dead_callbacks,
        "millrace_queue_sent_callbacks_total": reading.sent_callbacks,
    }


def plain_family(metric: Metric, figure: Figure) -> Family:
    """A metric with its present figure, in prometheus_client's types."""
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    made: CounterMetricFamily | GaugeMetricFamily = kind(metric.name, metric.help, labels=metric.labels)
    if isinstance(figure, Mapping):
        for labels, value in figure.items():
            made.add_metric([labels] if isinstance(labels, str) else labels, value)
    else:
        made.add_metric([], figure)
    return made
