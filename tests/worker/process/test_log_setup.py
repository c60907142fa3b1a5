from __future__ import annotations

import io
import json
import logging
import warnings
from typing import Any, Literal

import pytest
import structlog

from settings import LogSettings
from worker.runtime.log_setup import configure_logging


def logged(settings: LogSettings, stream: io.StringIO | None = None) -> io.StringIO:
    stream = stream or io.StringIO()
    configure_logging(settings, stream)
    return stream


def test_a_file_gets_json_lines() -> None:
    stream = logged(LogSettings())

    structlog.get_logger("millrace").info("shard claimed", job_id="s0-1", shard=3)

    event = json.loads(stream.getvalue())
    assert (event["event"], event["job_id"], event["shard"], event["level"]) == ("shard claimed", "s0-1", 3, "info")


def test_a_library_logs_in_the_same_form() -> None:
    stream = logged(LogSettings())

    logging.getLogger("celery.worker").warning("connection %s", "lost")

    assert json.loads(stream.getvalue())["event"] == "connection lost"


@pytest.mark.parametrize("logger", [logging.getLogger("celery"), structlog.get_logger("engine")])
def test_a_traceback_is_fields_of_one_line(logger: Any) -> None:
    stream = logged(LogSettings())
    try:
        raise OSError("disk full")
    except OSError:
        logger.exception("task failed")

    [line] = stream.getvalue().splitlines()
    [error] = json.loads(line)["exception"]
    assert (error["type"], error["text"], len(error["frames"])) == ("OSError", "disk full", 1)


@pytest.mark.parametrize("format_", ["json", "console"])
def test_neither_a_local_variable_nor_what_an_error_quotes_is_logged(format_: Literal["json", "console"]) -> None:
    stream = logged(LogSettings(format=format_))
    prompt = "my secret"
    try:
        int(prompt)
    except ValueError:
        logging.getLogger("worker").exception("a defect")
        structlog.get_logger("engine").exception("a defect")

    assert "secret" not in stream.getvalue()
    assert stream.getvalue().count("ValueError") == 2


def test_what_is_bound_to_a_thread_is_in_every_event_of_it() -> None:
    stream = logged(LogSettings())

    with structlog.contextvars.bound_contextvars(job_id="s0-1", shard=3, trace_id="ab"):
        logging.getLogger("redis").warning("connection lost")
    logging.getLogger("redis").warning("connection lost")

    bound, other = map(json.loads, stream.getvalue().splitlines())
    assert (bound["job_id"], bound["shard"], bound["trace_id"]) == ("s0-1", 3, "ab")
    assert not {"job_id", "shard", "trace_id"} & other.keys()


def test_a_librarys_text_is_one_line_and_names_redis() -> None:
    stream = logged(LogSettings())

    address = "worker.broker.messages:GuardedTransport://:**@127.0.0.1:6379/0"
    logging.getLogger("celery").error("Cannot connect to %s.\nTrying again in 2 s...\n", address)

    expected = "Cannot connect to redis://:**@127.0.0.1:6379/0. Trying again in 2 s..."
    assert json.loads(stream.getvalue())["event"] == expected


def test_pythons_own_warnings_are_events() -> None:
    stream = logged(LogSettings())

    warnings.showwarning("soon gone", UserWarning, "library.py", 7)  # as warnings.warn does, but where it raises here

    event = json.loads(stream.getvalue())
    assert event["logger"] == "py.warnings"
    assert event["event"].startswith("library.py:7: UserWarning: soon gone")


def test_an_event_about_a_request_has_its_job_and_shard() -> None:
    stream = logged(LogSettings())

    logging.getLogger("engine").warning("a checkpoint is dropped", extra={"request_id": "s0-1/17/3.ab12"})
    logging.getLogger("engine").warning("a checkpoint is dropped", extra={"request_id": "r"})

    event, other = map(json.loads, stream.getvalue().splitlines())
    assert (event["job_id"], event["shard"], event["index"]) == ("s0-1", 3, 17)
    assert "job_id" not in other


@pytest.mark.parametrize("field", ["prompt", "messages", "body", "output", "raw", "custom_id", "metadata"])
def test_prompts_and_answers_are_hidden_at_info(field: str) -> None:
    stream = logged(LogSettings())

    structlog.get_logger().info("request", **{field: "my secret"})

    assert "my secret" not in stream.getvalue()
    assert json.loads(stream.getvalue())[field] == "<9>"


def test_the_level_is_kept() -> None:
    stream = logged(LogSettings(level="warning"))

    structlog.get_logger().info("quiet")
    logging.getLogger("redis").info("quiet")

    assert stream.getvalue() == ""


def test_a_terminal_gets_plain_lines() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = logged(LogSettings(), Terminal())

    structlog.get_logger().info("shard claimed", job_id="s0-1")

    assert "shard claimed" in stream.getvalue()
    assert "s0-1" in stream.getvalue()
    assert not stream.getvalue().startswith("{")
    assert "Z" not in stream.getvalue()  # the time of day of whoever looks at it
