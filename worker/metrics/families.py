"""Figures in the form that Prometheus reads."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family

from worker.metrics.metric import Metric
from worker.metrics.step_histogram import StepHistogram

# A number, or one for each value of the metric's label or labels, or a histogram.
Figure = float | Mapping[str, float] | Mapping[tuple[str, str], float] | Mapping[tuple[str, ...], float] | StepHistogram


def family(metric: Metric, figure: Figure) -> Family:
    """One metric with what it is now."""
    if isinstance(figure, StepHistogram):
        histogram = HistogramMetricFamily(metric.name, metric.help)
        histogram.add_metric([], buckets=list(figure.buckets()), sum_value=figure.sum)
        return histogram
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    made: CounterMetricFamily | GaugeMetricFamily = kind(metric.name, metric.help, labels=metric.labels)
    if isinstance(figure, Mapping):
        for labels, value in figure.items():
            made.add_metric([labels] if isinstance(labels, str) else labels, value)
    else:
        made.add_metric([], figure)
    return made
