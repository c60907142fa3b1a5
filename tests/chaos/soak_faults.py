"""Random faults at random times."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable

import redis

from tests.chaos.faults import drop_connections, duplicate_message, junk_frame, steal_message
from tests.chaos.fleet import Fleet
from tests.chaos.fleet_worker import FleetWorker
from tests.support.restartable_redis import RestartableRedis

REDIS_DOWN_S = 0.5


class SoakFaults:
    """Hurts the workers of a fleet and its Redis, and counts."""

    def __init__(self, fleet: Fleet, server: RestartableRedis, *, freeze_s: float, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._fleet = fleet
        self._server = server
        self._bare = redis.Redis.from_url(server.url)
        self._freeze_s = freeze_s  # longer than a lease
        self._random = random.Random(seed)
        self._thaws: list[threading.Timer] = []
        # Kind -> (how often in relation to the others, what is done: False if there was nothing to do it to).
        self._faults: dict[str, tuple[int, Callable[[], object]]] = {
            "SIGKILL of a worker": (2, lambda: self._hurt_one(FleetWorker.kill)),
            "SIGTERM of a worker": (2, lambda: self._hurt_one(FleetWorker.terminate)),
            "SIGSTOP past the lease": (2, lambda: self._hurt_one(self._freeze)),
            "CLIENT KILL of all connections": (2, lambda: drop_connections(self._bare)),
            "Redis SIGKILL": (1, self._kill_redis),
            "duplicated message": (4, lambda: duplicate_message(self._bare)),
            "stolen message": (4, lambda: steal_message(self._bare)),
            "junk frame": (4, lambda: junk_frame(self._bare)),
        }

    def inject(self) -> None:
        """One fault, chosen by its weight."""
        kinds = list(self._faults)
        (kind,) = self._random.choices(kinds, [self._faults[name][0] for name in kinds])
        try:
            happened = self._faults[kind][1]()
        except redis.RedisError:
            return  # our own connection was hit by an earlier fault
        if happened is not False:
            self.counts[kind] += 1

    def stop(self) -> None:
        """Let nothing stay frozen."""
        for thaw in self._thaws:
            thaw.cancel()
        for worker in self._fleet.workers:
            worker.thaw()
        self._bare.close()

    def _hurt_one(self, hurt: Callable[[FleetWorker], None]) -> bool:
        """Only a worker that is up: while one loads it holds nothing."""
        workers = [worker for worker in self._fleet.workers if worker.is_up]
        if workers:
            hurt(self._random.choice(workers))
        return bool(workers)

    def _freeze(self, worker: FleetWorker) -> None:
        worker.freeze()
        thaw = threading.Timer(self._freeze_s, worker.thaw)
        thaw.daemon = True
        self._thaws.append(thaw)
        thaw.start()

    def _kill_redis(self) -> None:
        self._server.kill()
        time.sleep(REDIS_DOWN_S)
        self._server.start()
