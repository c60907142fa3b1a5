from __future__ import annotations

import logging

import pytest
from celery.exceptions import Reject

from worker.celery_worker import CeleryLogFilter
from worker.runtime.unit_runner import UnitFailed


def record_of(level: int, error: BaseException | None = None) -> logging.LogRecord:
    exc_info = None if error is None else (type(error), error, None)
    record = logging.LogRecord("celery.app.trace", level, __file__, 1, "what Celery says", (), exc_info)
    record.__dict__["data"] = {"kwargs": {"metadata": "private"}}
    return record


KNOWN = [
    record_of(logging.INFO),  # received, succeeded
    record_of(logging.WARNING, Reject("given back", requeue=True)),
    record_of(logging.ERROR, UnitFailed(KeyError("logged by its runner"))),
]


@pytest.mark.parametrize("record", KNOWN)
def test_what_is_no_news_is_a_debug_line_without_traceback(record: logging.LogRecord) -> None:
    logging.getLogger().setLevel(logging.INFO)
    assert not CeleryLogFilter().filter(record)

    logging.getLogger().setLevel(logging.DEBUG)
    assert CeleryLogFilter().filter(record)
    assert (record.levelname, record.exc_info) == ("DEBUG", None)


def test_other_errors_are_logged_as_they_are() -> None:
    record = record_of(logging.ERROR, TypeError("plan() takes 1 positional argument but 2 were given"))

    assert CeleryLogFilter().filter(record)
    assert (record.levelname, record.exc_info is None) == ("ERROR", False)


def test_the_tasks_arguments_are_dropped() -> None:
    record = record_of(logging.ERROR)

    CeleryLogFilter().filter(record)

    assert not hasattr(record, "data")
