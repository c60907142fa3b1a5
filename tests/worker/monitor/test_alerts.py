"""The alert rules, as Prometheus's own tool reads and runs them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.promql import MONITOR, alert_rules, metric_names
from worker.metrics.catalogue import METRICS

CASES = Path(__file__).with_name("alerts_cases.yml")
# Prometheus's own.
NOT_OURS = {"up"}

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (Debian: prometheus)")


def promtool(*arguments: str | Path) -> str:
    done = subprocess.run(
        ["promtool", *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, text=True
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@needs_promtool
def test_the_rules_parse() -> None:
    assert f"{len(alert_rules())} rules found" in promtool("check", "rules", MONITOR / "alerts.yml")


@needs_promtool
def test_each_alert_fires_when_it_should_and_only_then() -> None:
    promtool("test", "rules", CASES)


@needs_promtool
def test_prometheus_takes_its_configuration(tmp_path: Path) -> None:
    for name in ("prometheus.yml", "alerts.yml"):
        (tmp_path / name).write_text((MONITOR / name).read_text())

    assert "SUCCESS" in promtool("check", "config", tmp_path / "prometheus.yml")


def test_every_alert_is_seen_to_fire_and_seen_not_to() -> None:
    cases = [case for test in yaml.safe_load(CASES.read_text())["tests"] for case in test["alert_rule_test"]]
    names = {rule["alert"] for rule in alert_rules()}

    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == names
    assert {case["alertname"] for case in cases if not case.get("exp_alerts")} == names


@pytest.mark.parametrize("rule", alert_rules(), ids=lambda rule: str(rule["alert"]))
def test_an_alert_reads_metrics_that_exist_and_says_what_to_do(rule: dict[str, Any]) -> None:
    assert metric_names(rule["expr"]) - NOT_OURS <= {metric.name for metric in METRICS}
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert set(rule["annotations"]) == {"summary", "do", "runbook"}
    page, _, section = rule["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (MONITOR.parents[1] / page).read_text(), re.MULTILINE)
    assert section in {heading.lower().replace(" ", "-") for heading in headings}
