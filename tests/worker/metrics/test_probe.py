"""The health check of a container."""

from __future__ import annotations

from contextlib import closing

import pytest
from prometheus_client import CollectorRegistry

from tests.support.free_port import free_port
from worker.metrics.probe import main
from worker.metrics.server import MetricsServer


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_it_asks_where_the_settings_say(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("MILLRACE_METRICS__PORT", str(port))
    monkeypatch.setenv("MILLRACE_METRICS__HOST", host)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # not for a worker beside it
    assert main([]) == 1
    with closing(MetricsServer(host, port, CollectorRegistry(), list)):
        assert main([]) == 0


def test_it_says_why_the_worker_takes_no_work(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    with closing(MetricsServer("127.0.0.1", port, CollectorRegistry(), lambda: ["draining", "and more"])):
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
