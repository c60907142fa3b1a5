"""The declared metrics: their names, their units, and labels that are what the code counts by."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from worker.metrics.catalogue import (
    JOB_ENDS,
    LANES,
    METRICS,
    OTHER_TENANTS,
    OUTCOMES,
    PROCESS_METRICS,
    UNREAD_PRIORITY,
    Metric,
)
from worker.registry.lifecycle import Outcome
from worker.registry.queues import PRIORITY_STEPS
from worker.schemas import JobState, SubmitOptions

OURS = [metric for metric in METRICS if metric not in PROCESS_METRICS]
# What may hold anything that users write: no label is named after it.
PRIVATE = {"prompt", "text", "messages", "job", "job_id", "custom_id", "metadata", "request"}


@pytest.mark.parametrize("metric", OURS, ids=lambda metric: metric.name)
def test_a_metric_is_named_as_prometheus_has_it(metric: Metric) -> None:
    assert re.fullmatch(r"millrace_[a-z]+(_[a-z]+)*", metric.name)
    assert metric.name.endswith("_total") is (metric.kind == "counter")
    assert not re.search(r"_(ms|s|kb|mb|percent)(_|$)", metric.name), "base units, by their name"
    assert re.fullmatch(r"\S.{5,}\.", metric.help)
    assert bool(metric.buckets) is (metric.kind == "histogram")
    assert all(low < high for low, high in pairwise(metric.buckets))
    assert not PRIVATE & set(metric.labels)


def test_no_name_is_there_twice() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_labels_are_what_the_code_counts_by() -> None:
    assert tuple(Outcome) == OUTCOMES
    assert tuple(map(str, PRIORITY_STEPS)) == LANES
    assert set(JOB_ENDS) == {state.value for state in JobState if state.is_terminal}


@pytest.mark.parametrize("value", [OTHER_TENANTS, UNREAD_PRIORITY])
def test_what_stands_for_the_rest_is_no_tenant(value: str) -> None:
    pattern = next(item.pattern for item in SubmitOptions.model_fields["tenant"].metadata if hasattr(item, "pattern"))
    assert re.fullmatch(pattern, "a.b-c_9")
    assert not re.fullmatch(pattern, value)
