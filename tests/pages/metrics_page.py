"""worker/METRICS.md, from the catalogue of metrics."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence

from tests.pages.markdown import page, plain, table
from worker.metrics import catalogue
from worker.metrics.catalogue import Metric

_LABEL_VALUES = {
    "outcome": catalogue.OUTCOMES,
    "unit": catalogue.UNITS,
    "attempt": catalogue.ATTEMPTS,
    "end": catalogue.UNIT_ENDS,
    "status": catalogue.JOB_ENDS,
    "lane": catalogue.LANES,
    "part": catalogue.PARTS,
}


def metrics_page() -> str:
    """Every metric, by what it is about."""
    return page(
        "Metrics",
        f"{len(catalogue.METRICS)} metrics, served by each worker at `/metrics`, which is off unless "
        "`metrics.port` says where (`millrace worker --set metrics.port=9464`; containers have it on). "
        "Beside it `/healthz` answers 200 while the worker takes work, else 503 with the reasons.",
        _about(),
        _section("The worker", catalogue.WORKER_METRICS),
        _section("Its engine", catalogue.ENGINE_METRICS),
        _section("The queue, the same from every worker", catalogue.QUEUE_METRICS),
        _section("The process", catalogue.PROCESS_METRICS),
        "## Labels\n\n"
        + table(("label", "values"), ((f"`{name}`", _words(values)) for name, values in _LABEL_VALUES.items())),
    )


def _about() -> str:
    """What the catalogue says of itself, with its constants' values."""
    text = inspect.getdoc(catalogue) or ""
    return re.sub(r"\b[A-Z]+_[A-Z_]+\b", lambda match: f"{getattr(catalogue, match[0])}", text)


def _section(title: str, metrics: Sequence[Metric]) -> str:
    rows = ((f"`{metric.name}`", metric.kind, _words(metric.labels), _meaning(metric)) for metric in metrics)
    return f"## {title}\n\n{table(('metric', 'type', 'labels', 'what it is'), rows)}"


def _meaning(metric: Metric) -> str:
    if not metric.buckets:
        return plain(metric.help)
    return f"{plain(metric.help)} Buckets up to {', '.join(f'{bound:g}' for bound in metric.buckets)}."


def _words(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
