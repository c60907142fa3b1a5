"""What an operator sees of a run: the dashboard's panels with what Prometheus knows, and Flower."""

from __future__ import annotations

import base64
import json
import shutil
import time
import urllib.request
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.support.monitoring import DASHBOARD, MonitoredRun, chromium_executable, look_at, panels, status_of
from tests.support.processes import wait_until

PAGE = Path(__file__).with_name("panels.html")
GRID_PX = 36  # of one row of the dashboard's grid, with its gap

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium_executable() is None, reason="no Chromium (Debian: chromium)"),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="no Prometheus (Debian: prometheus)"),
]


class PanelReader(HTMLParser):
    """What the page says of each panel it drew: its series as [name, last value, greatest], or what went wrong."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.series: dict[int, list[tuple[str, float, float]]] = {}
        self.errors: dict[int, str] = {}
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if "data-panel" in values:
            number = int(values["data-panel"])
            self.series[number] = [tuple(one) for one in json.loads(values.get("data-series", "[]"))]
            if "data-error" in values:
                self.errors[number] = values["data-error"]


@pytest.fixture(scope="module")
def drawn(run: MonitoredRun, pictures: Path) -> PanelReader:
    dashboard = json.loads(DASHBOARD.read_text())
    view: dict[str, Any] = {
        "dashboard": dashboard,
        "prometheus": run.prometheus_url,
        "from_s": run.started_s,
        "to_s": time.time(),
        "step_s": 0.5,
        "variables": {"__rate_interval": "4s", "instance": ".*"},
    }
    page = pictures / "dashboard.html"
    page.write_text(PAGE.read_text().replace("/*VIEW*/null", json.dumps(view)))
    height = GRID_PX * max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"])
    seen = look_at(page.as_uri(), pictures / "dashboard.png", size=(1800, height + 40))
    assert "<title>drawn</title>" in seen.html
    return PanelReader(seen.html)


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: f"{panel['id']}-{panel['title']}")
def test_a_panel_of_the_dashboard_shows_the_run(drawn: PanelReader, panel: dict[str, Any]) -> None:
    assert panel["id"] not in drawn.errors, drawn.errors[panel["id"]]
    assert drawn.series[panel["id"]], "No data"


def test_the_dashboard_shows_what_happened(drawn: PanelReader) -> None:
    # Of two panels with one title the second is the graph.
    shown = {panel["title"]: {name: most for name, _, most in drawn.series[panel["id"]]} for panel in panels()}

    assert shown["Healthy workers"] == {"Healthy workers": 1}
    assert set(shown["Redis answers"].values()) == set(shown["Healthy"].values()) == {1}
    assert shown["Tokens/s"]["in"] > shown["Tokens/s"]["in, cached"] > 0
    assert shown["Tokens/s"]["out"] > 0
    assert 0.5 < shown["Prefix hit rate"]["of records"] < 1
    assert {"tiny, shop, priority 5", "tiny, press, priority 2"} <= set(shown["Waiting shards"])
    assert {"plans, lane 0", "tiny, lane 0"} <= set(shown["Messages"])
    assert shown["Open prompts"]["all"] > shown["Open prompts"]["shop"] > 0
    assert shown["Prompts without an answer in 10 minutes"]["error"] > 0
    assert max(shown["KV blocks in use"].values()) > 0
    assert shown["Batch size"]["90 %"] > 1
    assert shown["Step time"]["99 %"] >= shown["Step time"]["median"] > 0


def test_flower_wants_a_password(run: MonitoredRun) -> None:
    wrong = _basic("operator:not the password")
    for path in ("/", "/workers", "/tasks", "/broker", "/api/workers", "/api/tasks", "/api/task/types"):
        assert status_of(run.flower_url + path) == 401
        assert status_of(run.flower_url + path, wrong) == 401


def test_flower_may_not_stop_a_worker_even_with_the_password(run: MonitoredRun) -> None:
    known = _basic(f"operator:{run.flower_password}")
    worker = f"millrace@{run.worker_id}"
    for path in (f"/api/worker/shutdown/{worker}", "/api/task/send-task/millrace.plan", "/api/task/revoke/x"):
        assert status_of(run.flower_url + path, known, method="POST") == 403


def test_flower_shows_the_worker_and_its_tasks(run: MonitoredRun, pictures: Path) -> None:
    url = run.flower_url.replace("://", f"://operator:{run.flower_password}@")

    workers = look_at(f"{url}/workers", pictures / "flower-workers.png").text
    tasks = look_at(f"{url}/tasks", pictures / "flower-tasks.png").text

    # It offers browsers to break the line inside a worker's name.
    assert f"millrace@{run.worker_id}Online" in workers.replace(" ", "")
    assert "millrace.run_shard" in tasks
    assert "SUCCESS" in tasks
    assert run.flower_password not in workers + tasks


def test_flower_hears_the_worker_again_after_its_connections_were_cut(run: MonitoredRun) -> None:
    before = _heartbeats(run)
    run.server.admin.client_kill_filter(user="millrace-flower")

    wait_until(lambda: _heartbeats(run) > before + 1, timeout_s=30.0)


def test_nobody_wanted_more_of_redis_than_its_user_may(run: MonitoredRun) -> None:
    assert run.server.denials() == []


def _heartbeats(run: MonitoredRun) -> int:
    headers = {"Authorization": _basic(f"operator:{run.flower_password}")}
    request = urllib.request.Request(f"{run.flower_url}/workers?json=1", headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        (worker,) = json.load(answer)["data"]
    return int(worker["worker-heartbeat"])


def _basic(credentials: str) -> str:
    return "Basic " + base64.b64encode(credentials.encode()).decode()
