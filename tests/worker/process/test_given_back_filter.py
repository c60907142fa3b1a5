from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
from celery.exceptions import Reject

from worker.process.given_back_filter import GivenBackFilter


def record_of(error: BaseException) -> logging.LogRecord:
    exc_info = (type(error), error, None)
    return logging.LogRecord("celery.app.trace", logging.WARNING, __file__, 1, "rejected", (), exc_info)


@pytest.fixture
def root_level() -> Iterator[Callable[[int], None]]:
    root = logging.getLogger()
    before = root.level
    yield root.setLevel
    root.setLevel(before)


def test_a_message_given_back_is_a_debug_line_without_traceback(root_level: Callable[[int], None]) -> None:
    record = record_of(Reject("given back", requeue=True))
    root_level(logging.INFO)
    assert not GivenBackFilter().filter(record)
    root_level(logging.DEBUG)
    record = record_of(Reject("given back", requeue=True))
    assert GivenBackFilter().filter(record)
    assert (record.levelno, record.exc_info) == (logging.DEBUG, None)


def test_other_errors_are_logged_as_they_are() -> None:
    record = record_of(ValueError("broken"))
    assert GivenBackFilter().filter(record)
    assert record.levelno == logging.WARNING
    assert record.exc_info is not None
