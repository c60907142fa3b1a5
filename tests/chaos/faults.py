"""Does what goes wrong: around the workers, in the broker's frames, and inside a worker.

A fault is one function; its `client` is the bare Redis, which may also go back in time. A worker is killed exactly at
the point that a test names.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import redis
from kombu.transport.redis import QoS

from tests.chaos.fleet import Fleet, FleetWorker
from tests.support.fake_engine import FakeEngine
from tests.support.processes import running_thread, wait_until
from worker.registry.keys import Keys
from worker.registry.leases import Claim, UnitLeases
from worker.registry.lifecycle import PutStatus
from worker.registry.queues import lanes_by_priority, queue_of
from worker.registry.trust import has_renewed
from worker.runtime.held_units import HeldUnits

if TYPE_CHECKING:  # a worker that dies at a point imports this module, and needs no servers
    from tests.support.redis_servers import RestartableRedis, TcpProxy

_JUNK = (b"not JSON", b"", b"null", b"[]", b"{}", b"\xff\xfe", b'{"body": "*", "headers": {}, "properties": {}}')

_EXEC = b"*1\r\n$4\r\nEXEC\r\n"  # in the file

STEPS_BEFORE_DEATH = 3
REDIS_DOWN_S = 0.5

HISTORY_STEP_S = 0.01
HISTORY_LENGTH = 1000  # 10 s

DEATHS: dict[str, Callable[[], None]] = {
    # The message is out of its list and not yet in `unacked`: nobody has it.
    "after BRPOP": lambda: _die_before(QoS, "append"),
    "after claim": lambda: _die_after(UnitLeases, "claim", _is_claimed_shard),
    "mid-decode": lambda: _die_before(FakeEngine, "step", _steps_are_up()),
    "after put before ack": lambda: _die_after(UnitLeases, "put", _is_last_put),
    # The drain waits here for what runs.
    "during drain": lambda: _die_before(HeldUnits, "wait_empty"),
}
# Points in the plan of a strict job whose file is bad.
DEATHS_OF_PLANS: dict[str, Callable[[], None]] = {
    "before refusal": lambda: _die_before(UnitLeases, "fail"),
    "after refusal": lambda: _die_after(UnitLeases, "fail", bool),
}
# Here no signal comes: the worker ends itself, with 70.
BREAKAGES: dict[str, Callable[[], None]] = {
    "engine breaks": lambda: _die_before(FakeEngine, "step", _steps_are_up(), _break_engine),
    "device faults": lambda: _die_before(FakeEngine, "step", _steps_are_up(), _fault_device),
}


def lanes(client: redis.Redis) -> list[str]:
    """The broker's lists, once each: of plans, and of every model that was served since Redis began."""
    models = cast("list[bytes]", client.hkeys(Keys().known_models))
    queues = map(queue_of, ("", *(model.decode() for model in models)))
    return list(dict.fromkeys(lane for queue in queues for lane in lanes_by_priority(queue)))


def drop_connections(client: redis.Redis) -> int:
    """Kill every connection but our own; how many there were."""
    return int(client.client_kill_filter(_type="normal", skipme=True))


def freeze_redis(client: redis.Redis, seconds: float) -> None:
    """Stop the server's process for a while: its clients wait, and its clock goes on."""
    process_id = int(client.info("server")["process_id"])
    os.kill(process_id, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(process_id, signal.SIGCONT)


def flush_scripts(client: redis.Redis) -> None:
    """Let Redis forget every Lua script."""
    client.script_flush()


def duplicate_message(client: redis.Redis, copies: int = 1) -> bool:
    """Put copies of a message that waits or is being worked on into its lane; False if there is none."""
    for lane in lanes(client):
        frames = cast("list[bytes]", client.lrange(lane, 0, 0))
        if frames:
            client.lpush(lane, *frames * copies)
            return True
    held = cast("dict[bytes, bytes]", client.hgetall("unacked"))
    if not held:
        return False
    message, _, _ = json.loads(random.choice(list(held.values())))
    client.lpush(_lane_of(message), *[json.dumps(message)] * copies)
    return True


def steal_message(client: redis.Redis) -> bool:
    """Take a message out of its lane, as a worker does that dies with it; False if none waits."""
    return any(client.rpop(lane) is not None for lane in lanes(client))


def junk_frame(client: redis.Redis) -> None:
    """Push a frame that is no message."""
    client.lpush(random.choice(lanes(client)), random.choice(_JUNK))


class FileHistory:
    """Notes every few milliseconds how long the append-only file of a server is, so that it can be cut to its past."""

    def __init__(self, server: RestartableRedis) -> None:
        self.server = server
        self._sizes: deque[tuple[float, int]] = deque(maxlen=HISTORY_LENGTH)
        self.begin_again()

    @property
    def num_bytes(self) -> int:
        """How long the file is now: Redis writes before it answers."""
        return self._file.stat().st_size

    @property
    def num_whole_bytes(self) -> int:
        """Likewise up to the end of a script's writes: others may see the file in the middle of them.

        Of what is torn Redis makes more than it should at its second start, see AppendOnlyFile.
        """
        return self._file.read_bytes().rindex(_EXEC) + len(_EXEC)

    def run(self, stopping: threading.Event) -> None:
        """Note it until told to stop."""
        while not stopping.wait(HISTORY_STEP_S):
            if self._file.stat().st_ino != self._inode:
                self.begin_again()
            self._sizes.append((time.monotonic(), self.num_bytes))

    def bytes_ago(self, seconds: float) -> int:
        """How long the file was so many seconds ago, or when it began to be noted."""
        past_s, sizes = time.monotonic() - seconds, list(self._sizes)
        return next((size for at_s, size in reversed(sizes) if at_s <= past_s), sizes[0][1])

    def cut(self, seconds: float, *, down_s: float = 0.0) -> int:
        """Kill Redis and start it `down_s` later with its file of so many seconds ago; how many bytes it has lost."""
        return self.cut_to(self.bytes_ago(seconds), down_s=down_s)

    def cut_to(self, num_bytes: int, *, down_s: float = 0.0) -> int:
        """Likewise with a file of at most this length.

        Redis takes back all that a command or script wrote if the cut goes through it.
        """
        self.server.kill()
        kept = min(self.num_bytes, num_bytes)
        lost = self.num_bytes - kept
        os.truncate(self._file, kept)
        time.sleep(down_s)
        self.server.start()
        self.begin_again()
        return lost

    def begin_again(self) -> None:
        """Forget the past: what is written from now on has another, as Redis went back or wrote its file anew."""
        self._inode = self._file.stat().st_ino
        self._sizes.clear()
        self._sizes.append((time.monotonic(), self.num_bytes))

    @property
    def _file(self) -> Path:
        """From Redis 7 on the increment of several files."""
        files = self.server.directory.rglob("appendonly*.aof")
        return max(files, key=lambda path: (path.name.endswith(".incr.aof"), len(path.name), path.name))


@contextmanager
def file_history(server: RestartableRedis) -> Iterator[FileHistory]:
    """The history of a durable server's file, noted for the length of the block."""
    history = FileHistory(server)
    with running_thread(history.run):
        yield history


class RewindingRedis:
    """A primary and a replica behind one address: the primary's file is cut, or the replica promoted too early.

    address: where clients connect. link: through which the replica hears of writes. Both lead to the primary.
    """

    def __init__(
        self, histories: Sequence[FileHistory], *, address: TcpProxy, link: TcpProxy, chance: random.Random
    ) -> None:
        self._primary, self._replica = histories
        self._address = address
        self._link = link
        self._chance = chance
        self._follow()

    @property
    def url(self) -> str:
        """Of the present primary, past the address."""
        return self._primary.server.url

    @property
    def num_bytes(self) -> int:
        """How much the primary has written."""
        return self._primary.num_bytes

    def wait_renewed(self) -> None:
        """Wait until workers have had the primary write its file anew, so that no place in it moves any more."""
        with redis.Redis.from_url(self.url) as primary:
            wait_until(lambda: _has_renewed(primary))
        self._primary.begin_again()

    def cut(self, keep: int) -> None:
        """Cut its file by 0.1 to 3 s, but to no less than `keep` bytes."""
        past = self._primary.bytes_ago(self._chance.uniform(0.1, 3.0))
        self._primary.cut_to(max(past, keep), down_s=self._chance.uniform(0.0, 0.5))

    def split(self) -> None:
        """Promote the replica, which lacks the last 0.1 to 1 s, while some clients still write to the old primary."""
        old, new = self._primary.server, self._replica.server
        with redis.Redis.from_url(old.url) as before, redis.Redis.from_url(new.url) as after:
            before.set("split", 1)  # Redis waits for the last write of this connection
            wait_until(lambda: before.wait(1, 1000))  # until the replica has what was written so far
            with self._link.partition():
                time.sleep(self._chance.uniform(0.1, 1.0))
                after.replicaof("NO", "ONE")
            self._address.target_port = new.port
            for client in before.client_list(_type="normal"):
                if self._chance.random() < 0.5:
                    before.client_kill_filter(_id=client["id"])
            time.sleep(self._chance.uniform(0.1, 0.5))
        old.kill()
        self._primary, self._replica = self._replica, self._primary
        old.start()
        self._follow()

    def _follow(self) -> None:
        """Let the other follow the primary, and wait until it has caught up and writes a file of its own."""
        self._link.target_port = self._primary.server.port
        with redis.Redis.from_url(self._replica.server.url) as replica:
            replica.replicaof("127.0.0.1", str(self._link.port))
            wait_until(lambda: _has_caught_up(replica.info()))
        self._primary.begin_again()


def _has_renewed(client: redis.Redis) -> bool:
    info = client.info("persistence")
    return has_renewed(info) and not (info["aof_rewrite_in_progress"] or info["aof_rewrite_scheduled"])


def _has_caught_up(info: Mapping[str, Any]) -> bool:
    return info["master_link_status"] == "up" and info["aof_enabled"] and not info["aof_rewrite_in_progress"]


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
        # Kind -> (its weight, what is done; that returns False if there was nothing to do it to).
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
        """Thaw what is frozen."""
        for thaw in self._thaws:
            thaw.cancel()
        for worker in self._fleet.workers:
            worker.thaw()
        self._bare.close()

    def _hurt_one(self, hurt: Callable[[FleetWorker], None]) -> bool:
        """Hurt a worker that is up: one that loads has no work yet."""
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


@contextmanager
def redis_setting(client: redis.Redis, name: str, value: str) -> Iterator[None]:
    """CONFIG SET for the length of the block."""
    before = cast("dict[str, str]", client.config_get(name))[name]
    client.config_set(name, value)
    try:
        yield
    finally:
        client.config_set(name, before)


def _lane_of(message: dict[str, Any]) -> str:
    properties = message["properties"]
    return lanes_by_priority(properties["delivery_info"]["routing_key"])[int(properties["priority"])]


def die_at(point: str) -> None:
    """Let this process die when it first comes to `point`: of DEATHS or DEATHS_OF_PLANS (kill -9), or of BREAKAGES."""
    (DEATHS | DEATHS_OF_PLANS | BREAKAGES)[point]()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_before(
    owner: type, name: str, is_time: Callable[..., bool] = lambda *_: True, die: Callable[[], None] = _die
) -> None:
    original = getattr(owner, name)

    @wraps(original)
    def replaced(*args: Any, **options: Any) -> Any:
        if is_time(*args):
            die()
        return original(*args, **options)

    setattr(owner, name, replaced)


def _die_after(owner: type, name: str, is_time: Callable[[Any], bool]) -> None:
    original = getattr(owner, name)

    @wraps(original)
    def replaced(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        if is_time(result):
            _die()
        return result

    setattr(owner, name, replaced)


def _is_claimed_shard(result: object) -> bool:
    return isinstance(result, Claim) and not result.ref.is_plan


def _is_last_put(result: tuple[PutStatus, object]) -> bool:
    return result[0] in (PutStatus.UNIT_DONE, PutStatus.JOB_DONE)


def _steps_are_up() -> Callable[..., bool]:
    steps = iter(range(1_000_000))
    return lambda *_: next(steps) >= STEPS_BEFORE_DEATH


def _break_engine() -> None:
    raise RuntimeError("broken for a test")


def _fault_device() -> None:
    """Raise what PyTorch makes of a kernel's fault; whatever touches the device from then on never returns."""
    import torch  # here: it costs each worker of these tests 3 s, and one of them needs it

    def hang(*_: Any) -> None:
        time.sleep(3600)

    for name in ("close", "abort", "resume_state", "due_resume_states", "add_request", "step"):
        setattr(FakeEngine, name, hang)
    atexit.register(hang)  # as a driver whose context is torn down over a kernel that hangs
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
