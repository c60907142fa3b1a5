"""Structured logs on standard error. No prompt and no answer is ever logged at info or above."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog
from structlog.types import EventDict, Processor, WrappedLogger

from settings import LogSettings

# Fields that may hold what a user wrote or what the model answered.
_PRIVATE_FIELDS = frozenset({"prompt", "messages", "body", "text", "output", "raw", "line", "record", "completion"})


def configure_logging(settings: LogSettings, stream: TextIO | None = None) -> None:
    """Send our logs and those of the libraries (celery, kombu, redis) to `stream`, default standard error.

    Format `auto` is console on a terminal, JSON lines otherwise.
    """
    stream = sys.stderr if stream is None else stream
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        hide_private_fields,
    ]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.ExtraAdder(), *shared],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_renderers(settings, is_terminal=stream.isatty()),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(settings.level.upper())
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


def hide_private_fields(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Replace prompt and answer fields by their length, unless the event is a debug one."""
    if event.get("level") == "debug":
        return event
    for field in _PRIVATE_FIELDS & event.keys():
        value = event[field]
        event[field] = f"<{len(value)}>" if isinstance(value, str | bytes | list | tuple | dict) else value
    return event


def _renderers(settings: LogSettings, *, is_terminal: bool) -> list[Processor]:
    if settings.format == "console" or (settings.format == "auto" and is_terminal):
        return [structlog.dev.ConsoleRenderer(colors=is_terminal)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
