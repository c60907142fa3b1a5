"""Whether a worker takes work."""

from __future__ import annotations

from collections.abc import Mapping

from worker.metrics.watched_worker import WatchedWorker

# Of parts that come round every second or so. Celery's loop stands for 10 s where Redis does (redis.socket_timeout_s).
LATE_S = 15.0


class WorkerHealth:
    """Whether a message that anybody puts into the queue now would be taken and run, by what was seen to move.

    Needs no work: Celery's loop turns and has Redis answer a question for messages every second, an idle engine looks
    for work every second, and the threads come round in their own time.
    """

    def __init__(self, worker: WatchedWorker) -> None:
        self._worker = worker

    def reasons(self) -> list[str]:
        """Why the worker takes no work; empty if it does."""
        worker = self._worker
        phase = worker.phase()
        if phase != "up":
            return [phase]
        found = [f"{part} is {late_s:.0f} s late" for part, late_s in self.overdue().items() if late_s >= LATE_S]
        if worker.activity.num_ticks == 0:
            found.append("Celery has not begun to take messages")
        if not worker.reader.has_answered:
            found.append("Redis does not answer")
        if worker.keeper.overdue_s >= LATE_S:
            found.append(f"Redis has taken no heartbeat for {worker.keeper.overdue_s:.0f} s: is it full?")
        if worker.watchdog.untaken_s >= LATE_S:
            found.append(f"messages wait, threads are free and none was taken for {worker.watchdog.untaken_s:.0f} s")
        if worker.engine.stalled_for_s >= worker.settings.hang_timeout_s:
            found.append(f"a step of the engine has been running for {worker.engine.stalled_for_s:.0f} s")
        return found

    def overdue(self) -> Mapping[str, float]:
        """How many seconds past its time each part has not moved; of a worker that begins or ends none, since its parts
        do so one by one. A step of the engine may take its time.
        """
        worker = self._worker
        if worker.phase() != "up":
            return {}
        return {
            "consumer": max(worker.activity.tick_overdue_s, worker.activity.answer_overdue_s),
            "engine": worker.engine.idle_overdue_s,
            **{thread.name: thread.overdue_s for thread in worker.threads},
        }
