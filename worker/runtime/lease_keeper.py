"""Renews the leases of this worker, and announces units that no worker holds."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable

import redis

from settings import SettingsError, WorkerSettings
from worker.broker.messages import Announcer
from worker.registry.leases import UnitLeases
from worker.registry.lifecycle import PutStatus, StopReason
from worker.registry.models import BEAT_S, Heartbeats
from worker.registry.queues import PLAN_PRIORITY, ReapQueue
from worker.runtime.engine_thread import EngineThread
from worker.runtime.held_units import HeldUnits
from worker.runtime.unit_runner import CONFIRM_S, OFFER_LOOKS
from worker.schemas import WorkerInfo
from worker.unit_closer import UnitCloser

MEND_INTERVAL_S = 60.0  # between looks at all jobs, at most 10,000: for what only a Redis that forgets can do
WATCH_INTERVAL_S = 0.4  # how soon a cancelled or expired job is seen
MISSED_BEATS = 2  # after a lease ran out, until its holder counts as dead: it may have to connect again first

logger = logging.getLogger(__name__)


class LeaseKeeper:
    """Renews the leases of all held units, watches for cancelled jobs and deadlines, and sends the heartbeat.

    A worker whose engine has been in one step for `worker.hang_timeout_s` renews no more, and so loses its units.
    """

    def __init__(
        self,
        leases: UnitLeases,
        heartbeats: Heartbeats,
        held_units: HeldUnits,
        engine: EngineThread,
        *,
        settings: WorkerSettings,
        describe: Callable[[], WorkerInfo],
    ) -> None:
        self._leases = leases
        self._heartbeats = heartbeats
        self._held_units = held_units
        self._engine = engine
        self._renew_interval_s = settings.renew_interval_s
        # Not lease_s: a step may last longer (with 8B weights two cores take 80 s for a prefill of 2048 tokens).
        self._hang_timeout_s = settings.hang_timeout_s
        self._describe = describe
        self._beat_interval_s = beat_interval_s(settings)
        self._renew_at = self._beat_at = math.inf  # not running

    @property
    def overdue_s(self) -> float:
        """How long the next heartbeat is late; a heartbeat is a write, which a full Redis refuses."""
        return max(time.monotonic() - self._beat_at, 0.0)

    @property
    def _hangs(self) -> bool:
        return self._engine.stalled_for_s >= self._hang_timeout_s

    def run(self, stopping: threading.Event) -> None:
        """Keep leases until told to stop, then take the heartbeat back.

        Raises SettingsError where another worker has taken a name of our model while Redis had forgotten ours.
        """
        self._renew_at = self._beat_at = time.monotonic()
        while not stopping.wait(min(WATCH_INTERVAL_S, self._renew_interval_s / 2)):
            try:
                self._watch()
                # Each set after it worked, so that the next look tries again after a failure.
                if time.monotonic() >= self._renew_at:
                    self._renew()
                    self._renew_at = time.monotonic() + self._renew_interval_s
                if time.monotonic() >= self._beat_at:
                    self._heartbeats.beat(self._describe(), is_well=not self._hangs)
                    self._beat_at = time.monotonic() + self._beat_interval_s
            except redis.RedisError as error:
                logger.warning("leases could not be renewed: %s", error)
            except SettingsError as error:
                logger.error("this worker ends, its lines would be answered by two models: %s", error)
                raise
        try:
            self._heartbeats.forget(self._describe().id)
        except redis.RedisError as error:
            logger.warning("the heartbeat could not be taken back, it runs out by itself: %s", error)

    def _watch(self) -> None:
        held = self._held_units.all()
        for unit in held:
            if unit.is_past_deadline:
                unit.stop(StopReason.EXPIRED)
        if not held:
            return
        cancelled = self._leases.cancelled({unit.claim.ref.job_id for unit in held})
        for unit in held:
            if unit.claim.ref.job_id in cancelled:
                unit.stop(StopReason.CANCELLED)

    def _renew(self) -> None:
        if self._hangs:
            logger.warning("the engine hangs in a step: leases are not renewed")
            return
        held = self._held_units.all()
        if not held:
            return
        answers = self._leases.renew([unit.claim for unit in held])
        for unit, (status, mode, time_left_s) in zip(held, answers, strict=True):
            if status is PutStatus.OPEN:
                unit.set_time_left(time_left_s)
            if status is PutStatus.OPEN or not unit.is_written:
                # If it is lost, perhaps since its last record was written and the writer does not know yet: the owner
                # waits for the writer.
                unit.hear(status, mode)


def beat_interval_s(settings: WorkerSettings) -> float:
    """How often a worker says that it is there; its leases may be renewed more rarely."""
    return min(settings.renew_interval_s, BEAT_S)


class Reaper:
    """Announces again each unit whose message was lost or whose worker died, and closes units of jobs that end.

    Every worker runs one; the registry gives each due unit to one of them.
    """

    def __init__(
        self,
        due_units: ReapQueue,
        announcer: Announcer,
        closer: UnitCloser,
        *,
        interval_s: float,
        is_well: Callable[[], bool],
        offer: Callable[[], bool],
    ) -> None:
        self._due_units = due_units
        self._announcer = announcer
        self._closer = closer
        self._is_well = is_well  # a worker that hangs must leave due units to others
        self._interval_s = interval_s
        self._offer = offer  # see ShardSlots.offer
        self._mend_at = time.monotonic()

    def run(self, stopping: threading.Event) -> None:
        """Look again and again, until told to stop."""
        # Jitter: workers that started together do not go on looking together.
        while not stopping.wait(self._interval_s * random.uniform(0.5, 1.0)):
            if not self._is_well():
                continue
            try:
                self._due_units.file.renew()
                self._look(stopping)
                num_looks = 1
                while self._offer() and num_looks < OFFER_LOOKS and not stopping.wait(CONFIRM_S):
                    num_looks += 1
                self._mend_if_due()
            except redis.RedisError as error:
                logger.warning("could not look for work nobody does: %s", error)

    def _mend_if_due(self) -> None:
        if time.monotonic() < self._mend_at:
            return
        for plan in self._due_units.lost_plans():
            logger.error("Redis has lost the plan of a job, which is made again", extra=plan.log_fields)
            self._announcer.announce(plan, PLAN_PRIORITY)
        self._mend_at = time.monotonic() + MEND_INTERVAL_S

    def _look(self, stopping: threading.Event) -> None:
        for due in self._due_units.due():
            if stopping.is_set():
                return  # what was put off here is due again after its grace
            if due.should_close:
                self._closer.close_unclaimed(due.ref)
            else:
                logger.info("announcing the unit again", extra=due.ref.log_fields)
                self._announcer.announce(due.ref, due.priority, due.model)
