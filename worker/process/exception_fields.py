"""Exceptions in log events."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator

import redis
from structlog.types import EventDict, WrappedLogger

# Their texts are about the machine. Others quote the value they choke on, which may be a prompt or an answer.
_SPEAKING = (OSError, MemoryError, RuntimeError, redis.RedisError)
_SPEAKING_NAME = "engine.errors.EngineFatal"  # by name: a producer's process does not import the engine
_HIDDEN = "hidden: it may quote a prompt; log.level=debug shows it"
MAX_FRAMES = 30  # of each exception, the innermost


class ExceptionFields:
    """Turns an event's exc_info into its field `exception`: the exception and those behind it, without locals.

    As JSON a list of type, text and frames, the one that was raised first in it. As text, traceback lines.
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
        text = str(error) if self._shows_all_texts or _is_speaking(error) else _HIDDEN
        frames = traceback.extract_tb(error.__traceback__, limit=-MAX_FRAMES)
        return {
            "type": type(error).__qualname__,
            "text": text,
            "frames": [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames],
        }


def _is_speaking(error: BaseException) -> bool:
    kind = type(error)
    return isinstance(error, _SPEAKING) or f"{kind.__module__}.{kind.__qualname__}" == _SPEAKING_NAME


def _exception(exc_info: object) -> BaseException | None:
    """As structlog and logging hand it over: the exception, the triple of sys.exc_info, or True for the current one."""
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
