"""Sets up structured logs on standard error. No prompt and no answer is ever logged at info or above."""

from __future__ import annotations

import logging
import re
import sys
import time
import traceback
from collections.abc import Iterator
from typing import TextIO

import redis
import structlog
from structlog.types import EventDict, Processor, WrappedLogger

from settings import LogSettings

# Fields that may hold what a user wrote or what the model answered.
_PRIVATE_FIELDS = frozenset(
    {"prompt", "messages", "body", "text", "output", "raw", "line", "record", "completion"}
    | {"custom_id", "metadata", "args", "kwargs"}
)
_TRANSPORT = re.compile(r"worker\.broker\.messages:Guarded\w*Transport(?=://)")
_LINE_ENDS = re.compile(r"\s*\n\s*")
_REQUEST_ID = re.compile(r"(?P<job_id>[^/]+)/(?P<index>[0-9]+)/(?P<shard>[0-9]+)\.[^/]*")  # see ShardPrompts

# Errors whose texts are about the machine. Other texts quote a value, which may be a prompt or an answer.
_LOGGABLE = (OSError, MemoryError, RuntimeError, redis.RedisError)
_LOGGABLE_NAME = "engine.errors.EngineFatal"  # by name: a producer's process does not import the engine
_HIDDEN = "hidden: it may quote a prompt; log.level=debug shows it"
MAX_FRAMES = 30  # of each exception, the innermost

PACE_S = 60.0


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
        # At a terminal one knows the day and the time zone.
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
    """Add job, shard and line to an event with a request's id, which is all that the engine knows."""
    found = _REQUEST_ID.fullmatch(str(event.get("request_id", "")))
    if found is not None:
        event.setdefault("job_id", found["job_id"])
        event.setdefault("shard", int(found["shard"]))
        event.setdefault("index", int(found["index"]))
    return event


def tidy_text(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Put the text on one line, with `redis` for our transport's class, which Celery shows as the broker's scheme."""
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


class ExceptionFields:
    """Turns an event's exc_info into its field `exception`: the exception and its causes, without local variables.

    As text these are traceback lines, else a list of type, text and frames.
    """

    def __init__(self, *, as_text: bool, shows_all_texts: bool) -> None:
        self._as_text = as_text
        self._shows_all_texts = shows_all_texts

    def __call__(self, _logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        """A structlog processor."""
        error = _exception(event.pop("exc_info", None))
        if error is not None:
            described = [self._described(link) for link in _chain(error)]
            event["exception"] = "\n".join(map(_as_text, described)) if self._as_text else described
        return event

    def _described(self, error: BaseException) -> dict[str, object]:
        text = str(error) if self._shows_all_texts or _is_loggable(error) else _HIDDEN
        frames = traceback.extract_tb(error.__traceback__, limit=-MAX_FRAMES)
        return {
            "type": type(error).__qualname__,
            "text": text,
            "frames": [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames],
        }


def _is_loggable(error: BaseException) -> bool:
    kind = type(error)
    return isinstance(error, _LOGGABLE) or f"{kind.__module__}.{kind.__qualname__}" == _LOGGABLE_NAME


def _exception(exc_info: object) -> BaseException | None:
    """From what structlog and logging pass: the exception, the triple of sys.exc_info, or True for the current one."""
    if isinstance(exc_info, BaseException):
        return exc_info
    found = exc_info[1] if isinstance(exc_info, tuple) else sys.exception() if exc_info else None
    return found if isinstance(found, BaseException) else None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _as_text(described: dict[str, object]) -> str:
    frames = described["frames"]
    lines = [f"  {frame}" for frame in frames] if isinstance(frames, list) else []
    return "\n".join([f"{described['type']}: {described['text']}", *lines])


class PacedFilter(logging.Filter):
    """Lets through one record a minute of each logger below `prefix`, and all records of others.

    While its collector is away, OpenTelemetry logs several times for each batch of spans: a line a second.
    """

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = f"{prefix}."
        self._silent_until_s: dict[str, float] = {}  # by logger

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is to be logged."""
        if not record.name.startswith(self._prefix):
            return True
        now_s = time.monotonic()
        if now_s < self._silent_until_s.get(record.name, 0.0):
            return False
        self._silent_until_s[record.name] = now_s + PACE_S
        return True
