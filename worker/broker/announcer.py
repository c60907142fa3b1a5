"""Messages that say where work is."""

from __future__ import annotations

import logging

import redis
from celery import Celery
from kombu.exceptions import OperationalError

from worker.broker.queue_lanes import PLAN_PRIORITY, QUEUE
from worker.registry.unit_ref import UnitRef

PLAN_TASK = "millrace.plan"
RUN_SHARD_TASK = "millrace.run_shard"

logger = logging.getLogger(__name__)


class Announcer:
    """Publishes the message of a unit. A message is a hint: one that cannot be sent is sent later by a reaper."""

    def __init__(self, app: Celery) -> None:
        self._app = app

    def announce(self, ref: UnitRef, priority: int) -> None:
        """Tell some worker to look at a unit of a job of this priority."""
        task, arguments = (PLAN_TASK, [ref.job_id]) if ref.is_plan else (RUN_SHARD_TASK, [ref.job_id, int(ref.unit)])
        priority = PLAN_PRIORITY if ref.is_plan else priority
        try:
            self._app.send_task(task, args=arguments, queue=QUEUE, priority=priority)
        except (OperationalError, redis.RedisError, OSError) as error:
            logger.warning("a unit could not be announced, a reaper will: %s", error, extra=ref.log_fields)
