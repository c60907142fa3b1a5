from __future__ import annotations

import io
import json
import logging

import pytest
import structlog

from settings import LogSettings
from worker.process.log_setup import configure_logging


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


def test_a_traceback_stays_on_one_line() -> None:
    stream = logged(LogSettings())
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("celery").exception("task failed")

    [line] = stream.getvalue().splitlines()
    assert "ValueError: broken" in json.loads(line)["exception"]


@pytest.mark.parametrize("field", ["prompt", "messages", "body", "output", "raw"])
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
    assert not stream.getvalue().startswith("{")
