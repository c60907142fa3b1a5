"""What Celery says of tasks, as far as it is news."""

from __future__ import annotations

import logging

from celery.exceptions import Reject

from worker.units.errors import UnitFailed


class CeleryLogFilter(logging.Filter):
    """Makes debug lines of what is logged elsewhere with the ids of its job, and drops the tasks' arguments.

    Celery says of each task that it was received and that it succeeded, without saying which job it was about, and at
    each reconnection what it does about its prefetch count. It
    warns with ten lines of traceback whenever a message goes back, which is how a full, draining or unwell worker
    passes a unit on: 640 times in five minutes of fault injection. What failed over a unit was logged by its runner.
    Arguments of `millrace.submit` hold the producer's own notes.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is to be logged."""
        record.__dict__.pop("data", None)
        is_known = record.exc_info is not None and isinstance(record.exc_info[1], Reject | UnitFailed)
        if record.levelno > logging.INFO and not is_known:
            return True
        record.levelno, record.levelname, record.exc_info = logging.DEBUG, "DEBUG", None
        return logging.getLogger().isEnabledFor(logging.DEBUG)
