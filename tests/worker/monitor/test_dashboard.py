"""The dashboard's file, and the alert rules as Prometheus's own tool runs them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.monitoring import DASHBOARD, MONITOR, alert_rules, expressions, metric_names, panels
from worker.metrics.catalogue import METRICS

GRAFANA_COLUMNS = 24

CASES = Path(__file__).with_name("alerts_cases.yml")
# Prometheus's own.
NOT_OURS = {"up"}

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (Debian: prometheus)")


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: f"{panel['id']}-{panel['title']}")
def test_a_panel_has_a_title_a_unit_a_description_and_metrics_that_exist(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["targets"]
    for target in panel["targets"]:
        assert target["datasource"]["uid"] == "millrace"
        assert target["legendFormat"]
    for expression in expressions(panel):
        assert "$" not in expression, "a variable that nobody replaces"
        assert metric_names(expression) <= {metric.name for metric in METRICS}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (Debian: prometheus)")
def test_every_expression_is_promql(tmp_path: Path) -> None:
    texts = [text for panel in panels() for text in expressions(panel)]
    rules = [{"record": f"panel:{number}", "expr": text} for number, text in enumerate(texts)]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))

    done = subprocess.run(["promtool", "check", "rules", file], capture_output=True, check=False, text=True)

    assert done.returncode == 0, done.stderr
    assert f"{len(texts)} rules found" in done.stdout


def test_panels_lie_side_by_side_and_in_rows() -> None:
    taken: set[tuple[int, int]] = set()
    everything = json.loads(DASHBOARD.read_text())["panels"]
    for panel in everything:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} covers another panel"
        assert place["x"] + place["w"] <= GRAFANA_COLUMNS
        taken |= cells
    assert len({panel["id"] for panel in everything}) == len(everything)
    assert [panel["gridPos"]["y"] for panel in everything] == sorted(panel["gridPos"]["y"] for panel in everything)


def test_dashboard_data_source_and_compose_name_each_other_rightly() -> None:
    compose = yaml.safe_load((MONITOR.parents[1] / "compose.yaml").read_text())["services"]
    source = yaml.safe_load((MONITOR / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"][0]
    provider = yaml.safe_load((MONITOR / "grafana/provisioning/dashboards/millrace.yml").read_text())["providers"][0]
    scrape = yaml.safe_load((MONITOR / "prometheus.yml").read_text())
    mounts = dict(volume.split(":")[:2][::-1] for volume in compose["grafana"]["volumes"])

    assert source["uid"] == "millrace"
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == scrape["global"]["scrape_interval"]
    assert mounts[provider["options"]["path"]] == "./worker/monitor/grafana/dashboards"
    assert mounts["/etc/grafana/provisioning"] == "./worker/monitor/grafana/provisioning"
    found = scrape["scrape_configs"][0]["dns_sd_configs"][0]
    assert set(found["names"]) <= set(compose)
    assert f"MILLRACE_METRICS__PORT={found['port']}\n" in (MONITOR.parent / "Dockerfile").read_text()


def test_it_can_be_seen_from_this_machine_alone_and_changes_nothing() -> None:
    compose = yaml.safe_load((MONITOR.parents[1] / "compose.yaml").read_text())["services"]
    for name in ("flower", "prometheus", "grafana"):
        assert compose[name]["profiles"] == ["monitor"]
        assert all(port.startswith("127.0.0.1:") for port in compose[name]["ports"])
    grafana = compose["grafana"]["environment"]
    assert grafana["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert grafana["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert "FLOWER_UNAUTHENTICATED_API" not in compose["flower"]["environment"]


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
