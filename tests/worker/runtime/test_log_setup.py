"""What a worker logs and in which form, and what of Celery's logs is left out."""

from __future__ import annotations

import io
import json
import logging
import sys
import warnings
from typing import Any, Literal

import pytest
import redis
import structlog
from celery.exceptions import Reject
from structlog.types import EventDict

from engine.errors import EngineFatal
from settings import LogSettings
from worker.celery_worker import CeleryLogFilter
from worker.runtime.log_setup import PACE_S, ExceptionFields, PacedFilter, configure_logging
from worker.runtime.unit_runner import UnitFailed

SECRET = "what a user wrote"


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

    logging.getLogger("engine").warning("a resume state is dropped", extra={"request_id": "s0-1/17/3.ab12"})
    logging.getLogger("engine").warning("a resume state is dropped", extra={"request_id": "r"})

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
    assert "Z" not in stream.getvalue()  # the local time of day


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    """`error` as it is caught: with frames, one of which has the secret in a local variable."""
    try:
        local = SECRET
        raise error from cause
    except type(error) as caught:
        assert local
        return caught


def described(error: Exception, *, as_text: bool = False, shows_all_texts: bool = False) -> EventDict:
    fields = ExceptionFields(as_text=as_text, shows_all_texts=shows_all_texts)
    return dict(fields(None, "error", {"event": "broke", "exc_info": error}))


def test_an_exception_is_its_type_text_and_frames() -> None:
    [link] = described(raised(OSError("no space left on device")))["exception"]

    assert (link["type"], link["text"]) == ("OSError", "no space left on device")
    assert len(link["frames"]) == 1
    assert link["frames"][0].startswith(f"{__file__}:")
    assert link["frames"][0].endswith(" raised")


def test_what_caused_it_follows() -> None:
    cause = raised(redis.ConnectionError("refused"))

    chain = described(raised(EngineFatal("the step failed"), cause))["exception"]

    assert [(link["type"], link["text"]) for link in chain] == [
        ("EngineFatal", "the step failed"),
        ("ConnectionError", "refused"),
    ]


@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize(
    "error",
    [
        ValueError(SECRET),
        KeyError(SECRET),
        UnicodeEncodeError("utf-8", SECRET, 0, 1, SECRET),
        AssertionError(SECRET),
        EngineFatal("fine"),  # whose cause quotes it
    ],
)
def test_a_text_that_may_quote_a_prompt_is_hidden_and_locals_always(error: Exception, as_text: bool) -> None:
    cause = raised(TypeError(SECRET))

    event = described(raised(error, cause), as_text=as_text)

    assert SECRET not in repr(event)
    assert type(error).__name__ in repr(event)


def test_it_is_shown_where_everything_is_to_be_logged() -> None:
    [link] = described(raised(ValueError(SECRET)), shows_all_texts=True)["exception"]

    assert link["text"] == SECRET


def test_on_a_terminal_each_frame_has_its_line() -> None:
    text = described(raised(OSError("no space left on device")), as_text=True)["exception"]

    first, second = text.splitlines()
    assert first == "OSError: no space left on device"
    assert second.startswith(f"  {__file__}:")


def test_all_three_ways_of_naming_the_exception_are_understood() -> None:
    fields = ExceptionFields(as_text=False, shows_all_texts=False)
    try:
        raise OSError("away")
    except OSError as error:
        ways: list[object] = [error, sys.exc_info(), True]
        found = [fields(None, "error", {"exc_info": way})["exception"] for way in ways]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("nothing", [None, False, (None, None, None)])
def test_without_an_exception_there_is_no_field(nothing: object) -> None:
    event = ExceptionFields(as_text=False, shows_all_texts=False)(None, "error", {"exc_info": nothing})

    assert dict(event) == {}


def test_a_chain_that_ends_in_itself_ends() -> None:
    first, second = OSError("a"), OSError("b")
    first.__context__, second.__context__ = second, first

    assert len(described(first)["exception"]) == 2


def celery_record(level: int, error: BaseException | None = None) -> logging.LogRecord:
    exc_info = None if error is None else (type(error), error, None)
    record = logging.LogRecord("celery.app.trace", level, __file__, 1, "what Celery says", (), exc_info)
    record.__dict__["data"] = {"kwargs": {"metadata": "private"}}
    return record


KNOWN = [
    celery_record(logging.INFO),  # received, succeeded
    celery_record(logging.WARNING, Reject("given back", requeue=True)),
    celery_record(logging.ERROR, UnitFailed(KeyError("logged by its runner"))),
]


@pytest.mark.parametrize("record", KNOWN)
def test_what_is_no_news_is_a_debug_line_without_traceback(record: logging.LogRecord) -> None:
    logging.getLogger().setLevel(logging.INFO)
    assert not CeleryLogFilter().filter(record)

    logging.getLogger().setLevel(logging.DEBUG)
    assert CeleryLogFilter().filter(record)
    assert (record.levelname, record.exc_info) == ("DEBUG", None)


def test_other_errors_are_logged_as_they_are() -> None:
    record = celery_record(logging.ERROR, TypeError("plan() takes 1 positional argument but 2 were given"))

    assert CeleryLogFilter().filter(record)
    assert (record.levelname, record.exc_info is None) == ("ERROR", False)


def test_the_tasks_arguments_are_dropped() -> None:
    record = celery_record(logging.ERROR)

    CeleryLogFilter().filter(record)

    assert not hasattr(record, "data")


def exporter_record(logger: str) -> logging.LogRecord:
    return logging.LogRecord(logger, logging.ERROR, __file__, 1, "the collector is away", (), None)


def test_each_logger_of_the_library_has_one_record_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("worker.runtime.log_setup.time.monotonic", lambda: now_s)
    paced = PacedFilter("opentelemetry")

    assert [paced.filter(exporter_record("opentelemetry.exporter")) for _ in range(3)] == [True, False, False]
    assert paced.filter(exporter_record("opentelemetry.sdk"))
    now_s += PACE_S
    assert paced.filter(exporter_record("opentelemetry.exporter"))


def test_others_are_let_through() -> None:
    paced = PacedFilter("opentelemetry")

    assert all(
        paced.filter(exporter_record(name)) for name in ("worker", "worker", "opentelemetryish", "opentelemetryish")
    )
