"""What stands in the expressions of the alert rules and of the dashboard."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

MONITOR = Path(__file__).resolve().parents[2] / "worker" / "monitor"
DASHBOARD = MONITOR / "grafana" / "dashboards" / "millrace.json"

# What Grafana puts in place of its variables; the interval is four scrapes.
_VARIABLES = {"$__rate_interval": "40s", "$instance": ".*"}
_NAME = re.compile(r"(?<![\w\"./-])(?:millrace|process)_[a-z0-9_]+\b(?!\s*=)")
_HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")


def alert_rules() -> list[dict[str, Any]]:
    """Those of alerts.yml."""
    groups = yaml.safe_load((MONITOR / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    """The dashboard's panels, without the headings of its rows."""
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def expressions(panel: dict[str, Any], **variables: str) -> list[str]:
    """A panel's expressions as Prometheus gets them."""
    values = {**_VARIABLES, **{f"${name}": value for name, value in variables.items()}}
    texts = [target["expr"] for target in panel["targets"]]
    for name, value in values.items():
        texts = [text.replace(name, value) for text in texts]
    return texts


def metric_names(expression: str) -> set[str]:
    """The metrics that an expression reads, a histogram by its own name."""
    names = set(_NAME.findall(expression))
    return {next((name.removesuffix(part) for part in _HISTOGRAM_PARTS if name.endswith(part)), name) for name in names}
