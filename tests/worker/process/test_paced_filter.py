from __future__ import annotations

import logging

import pytest

from worker.runtime.log_setup import INTERVAL_S, PacedFilter


def record_of(logger: str) -> logging.LogRecord:
    return logging.LogRecord(logger, logging.ERROR, __file__, 1, "the collector is away", (), None)


def test_each_logger_of_the_library_has_one_record_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("worker.runtime.log_setup.time.monotonic", lambda: now_s)
    paced = PacedFilter("opentelemetry")

    assert [paced.filter(record_of("opentelemetry.exporter")) for _ in range(3)] == [True, False, False]
    assert paced.filter(record_of("opentelemetry.sdk"))
    now_s += INTERVAL_S
    assert paced.filter(record_of("opentelemetry.exporter"))


def test_others_are_let_through() -> None:
    paced = PacedFilter("opentelemetry")

    assert all(paced.filter(record_of(name)) for name in ("worker", "worker", "opentelemetryish", "opentelemetryish"))
