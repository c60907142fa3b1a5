"""Structured logs on standard error. No prompt and no answer is ever logged at info or above."""

from __future__ import annotations

import logging
import re
import sys
from typing import TextIO

import structlog
from structlog.types import EventDict, Processor, WrappedLogger

from settings import LogSettings
from worker.process.exception_fields import ExceptionFields
from worker.process.paced_filter import PacedFilter

# Fields that may hold what a user wrote or what the model answered.
_PRIVATE_FIELDS = frozenset(
    {"prompt", "messages", "body", "text", "output", "raw", "line", "record", "completion"}
    | {"custom_id", "metadata", "args", "kwargs"}
)
_TRANSPORT = re.compile(r"worker\.broker\.guarded_(socket_)?transport:\w+(?=://)")
_LINE_ENDS = re.compile(r"\s*\n\s*")
_REQUEST_ID = re.compile(r"(?P<job_id>[^/]+)/(?P<index>[0-9]+)/(?P<shard>[0-9]+)\.[^/]*")  # see ShardPrompts


def configure_logging(settings: LogSettings, stream: TextIO | None = None) -> None:
    """Send our logs, those of libraries and the warnings of Python to `stream`, default standard error.

    Format `auto` is console on a terminal, JSON lines otherwise.
    """
    stream = sys.stderr if stream is None else stream
    is_console = settings.format == "console" or (settings.format == "auto" and stream.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        # Whoever sits at a terminal knows the day and has a clock.
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if is_console else "iso", utc=not is_console),
        add_ids_of_request,
        tidy_text,
        hide_private_fields,
        ExceptionFields(as_text=is_console, shows_all_texts=settings.level == "debug"),
    ]
    handler = logging.StreamHandler(stream)
    handler.addFilter(PacedFilter("opentelemetry"))
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.ExtraAdder(), *shared],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_renderers(is_console=is_console, is_terminal=stream.isatty()),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(settings.level.upper())
    logging.captureWarnings(True)  # Python's own would go to standard error as they are
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def add_ids_of_request(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Give an event about a request its job, shard and line: the engine knows the request's id alone."""
    found = _REQUEST_ID.fullmatch(str(event.get("request_id", "")))
    if found is not None:
        event.setdefault("job_id", found["job_id"])
        event.setdefault("shard", int(found["shard"]))
        event.setdefault("index", int(found["index"]))
    return event


def tidy_text(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """On one line; and Celery shows the broker's address with the class of our transport for a scheme."""
    event["event"] = _TRANSPORT.sub("redis", _LINE_ENDS.sub(" ", str(event["event"]).strip()))
    return event


def hide_private_fields(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Replace prompt and answer fields by their length, unless the event is a debug one."""
    if event.get("level") == "debug":
        return event
    for field in _PRIVATE_FIELDS & event.keys():
        value = event[field]
        event[field] = f"<{len(value)}>" if isinstance(value, str | bytes | list | tuple | dict) else value
    return event


def name_libraries_only(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Drop the name of a logger of ours: a terminal's lines are long enough."""
    if str(event.get("logger")).startswith(("worker.", "engine.")):
        del event["logger"]
    return event


def _renderers(*, is_console: bool, is_terminal: bool) -> list[Processor]:
    if not is_console:
        return [structlog.processors.JSONRenderer()]
    # Not rich's tracebacks, which are the default where rich is installed: they show every local variable.
    plain = structlog.dev.plain_traceback
    return [name_libraries_only, structlog.dev.ConsoleRenderer(colors=is_terminal, exception_formatter=plain)]
