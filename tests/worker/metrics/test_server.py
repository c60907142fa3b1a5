"""The declared metrics, the server that shows them, and the health check of a container."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise

import pytest
from prometheus_client import CollectorRegistry, Gauge

from settings import SettingsError
from tests.support.monitoring import get, health, scrape
from tests.support.processes import wait_until
from tests.support.redis_servers import free_port
from worker.metrics.catalogue import (
    JOB_ENDS,
    LANES,
    METRICS,
    OTHER_TENANTS,
    PROCESS_METRICS,
    UNREAD_PRIORITY,
    Metric,
)
from worker.metrics.probe import main
from worker.metrics.server import MetricsServer
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
    assert tuple(map(str, PRIORITY_STEPS)) == LANES
    assert set(JOB_ENDS) == {state.value for state in JobState if state.is_terminal}


@pytest.mark.parametrize("value", [OTHER_TENANTS, UNREAD_PRIORITY])
def test_what_stands_for_the_rest_is_no_tenant(value: str) -> None:
    pattern = next(item.pattern for item in SubmitOptions.model_fields["tenant"].metadata if hasattr(item, "pattern"))
    assert re.fullmatch(pattern, "a.b-c_9")
    assert not re.fullmatch(pattern, value)


@contextmanager
def _started(server: MetricsServer) -> Iterator[None]:
    server.start()
    with closing(server):
        yield


@contextmanager
def _serving(reasons: list[str], host: str = "127.0.0.1") -> Iterator[int]:
    port, registry = free_port(), CollectorRegistry()
    Gauge("seven", "Always 7.", registry=registry).set(7)
    with _started(MetricsServer(host, port, registry, lambda: reasons)):
        yield port


def test_metrics_are_those_of_its_own_registry() -> None:
    with _serving([]) as port:
        assert scrape(port) == {"seven": 7}


def test_health_is_200_without_a_reason_and_503_with_one() -> None:
    reasons: list[str] = []
    with _serving(reasons) as port:
        assert get(port, "/healthz") == (200, json.dumps({"status": "ok", "reasons": []}))
        reasons.append("the engine is asleep")
        assert get(port, "/healthz")[0] == 503
        assert health(port) == (503, ["the engine is asleep"])


def test_figures_that_cannot_be_made_are_500_and_a_log_event(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> list[str]:
        raise RuntimeError("no figures")

    port = free_port()
    with _started(MetricsServer("127.0.0.1", port, CollectorRegistry(), fail)):
        assert get(port, "/healthz") == (500, "see the worker's log\n")
    assert "no figures" in caplog.text


def test_nothing_else_is_served() -> None:
    with _serving([]) as port:
        assert get(port, "/")[0] == 404


def test_after_close_the_port_is_free_again() -> None:
    with _serving([]) as port:
        pass
    with _started(MetricsServer("127.0.0.1", port, CollectorRegistry(), list)):
        pass


def test_a_client_that_says_nothing_holds_up_nobody() -> None:
    with _serving([]) as port, socket.create_connection(("127.0.0.1", port)):
        assert scrape(port) == {"seven": 7}


def test_a_port_in_use_is_said_with_the_setting() -> None:
    with _serving([]) as port:
        text = (
            f"metrics.port={port}: another program, perhaps another worker, has this port; "
            "accepted: a free port of 127.0.0.1, or none"
        )
        with pytest.raises(SettingsError, match=re.escape(text)):
            MetricsServer("127.0.0.1", port, CollectorRegistry(), list).start()


@pytest.mark.parametrize("host", ["192.0.2.1", "nobody.invalid"])
def test_an_address_of_another_machine_is_said_with_the_setting(host: str) -> None:
    with pytest.raises(SettingsError, match=rf"metrics\.host={host}: accepted: an address or name of this machine"):
        MetricsServer(host, free_port(), CollectorRegistry(), list).start()


def test_a_client_that_is_silent_too_long_is_an_event_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("worker.metrics.server._Handler.timeout", 0.05)
    with _serving([]) as port, socket.create_connection(("127.0.0.1", port)):
        wait_until(lambda: "was not answered" in caplog.text)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_it_asks_where_the_settings_say(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("MILLRACE_METRICS__PORT", str(port))
    monkeypatch.setenv("MILLRACE_METRICS__HOST", host)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # not for a worker beside it
    assert main([]) == 1
    with _started(MetricsServer(host, port, CollectorRegistry(), list)):
        assert main([]) == 0


def test_it_says_why_the_worker_takes_no_work(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    with _started(MetricsServer("127.0.0.1", port, CollectorRegistry(), lambda: ["draining", "and more"])):
        assert main([f"http://127.0.0.1:{port}"]) == 1
    assert capsys.readouterr().err == "draining\nand more\n"


def test_without_a_port_there_is_nobody_to_ask(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MILLRACE_METRICS__PORT", raising=False)
    assert main([]) == 1
    assert "metrics.port is none" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["nonsense", "http://127.0.0.1"])
def test_a_url_without_host_and_port_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([url]) == 1
    assert "accepted: http://HOST:PORT" in capsys.readouterr().err
