from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from prometheus_client import CollectorRegistry, Gauge

from settings import SettingsError
from tests.support.free_port import free_port
from tests.support.scrape import get, health, scrape
from tests.support.wait_until import wait_until
from worker.metrics.server import MetricsServer


@contextmanager
def _serving(reasons: list[str], host: str = "127.0.0.1") -> Iterator[int]:
    port, registry = free_port(), CollectorRegistry()
    Gauge("seven", "Always 7.", registry=registry).set(7)
    with closing(MetricsServer(host, port, registry, lambda: reasons)):
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
    with closing(MetricsServer("127.0.0.1", port, CollectorRegistry(), fail)):
        assert get(port, "/healthz") == (500, "see the worker's log\n")
    assert "no figures" in caplog.text


def test_nothing_else_is_served() -> None:
    with _serving([]) as port:
        assert get(port, "/")[0] == 404


def test_after_close_the_port_is_free_again() -> None:
    with _serving([]) as port:
        pass
    closing_again = MetricsServer("127.0.0.1", port, CollectorRegistry(), list)
    closing_again.close()


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
            MetricsServer("127.0.0.1", port, CollectorRegistry(), list)


@pytest.mark.parametrize("host", ["192.0.2.1", "nobody.invalid"])
def test_an_address_of_another_machine_is_said_with_the_setting(host: str) -> None:
    with pytest.raises(SettingsError, match=rf"metrics\.host={host}: accepted: an address or name of this machine"):
        MetricsServer(host, free_port(), CollectorRegistry(), list)


def test_a_client_that_is_silent_too_long_is_an_event_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("worker.metrics.server._Handler.timeout", 0.05)
    with _serving([]) as port, socket.create_connection(("127.0.0.1", port)):
        wait_until(lambda: "was not answered" in caplog.text)
    assert capfd.readouterr().err == ""
