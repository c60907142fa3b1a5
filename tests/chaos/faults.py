"""Does what goes wrong: around the workers, in the broker's frames, and inside a worker.

A fault is one function; its `client` is the bare Redis. Frames of the broker's lists are spoiled in 23 known ways, or
as hypothesis finds them. A worker is killed exactly at the point that a test names.
"""

from __future__ import annotations

import atexit
import base64
import copy
import json
import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import redis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from kombu.transport.redis import QoS

from tests.support.fake_engine import FakeEngine
from tests.support.processes import running_thread
from worker.client import BatchClient
from worker.registry.keys import Keys
from worker.registry.leases import Claim, UnitLeases
from worker.registry.lifecycle import PutStatus
from worker.registry.queues import lanes_by_priority, queue_of
from worker.runtime.held_units import HeldUnits

if TYPE_CHECKING:  # a worker that dies at a point imports this module, and needs no servers
    from tests.support.redis_servers import RestartableRedis

_JUNK = (b"not JSON", b"", b"null", b"[]", b"{}", b"\xff\xfe", b'{"body": "*", "headers": {}, "properties": {}}')

PLAN_LANE = "millrace"
Frame = dict[str, Any]
Spoil = Callable[[Frame], None]

SURPLUS = 1.5  # hypothesis repeats itself: null, empty bytes and the like
_HEADERS = (
    "lang task id shadow eta expires group group_index retries timelimit root_id parent_id argsrepr kwargsrepr origin "
    "ignore_result replaced_task_nesting stamped_headers stamps x-death"
)
_PROPERTIES = "correlation_id reply_to delivery_mode delivery_info priority body_encoding delivery_tag"
PATHS = (
    *[(name,) for name in ("body", "content-type", "content-encoding", "headers", "properties", "unheard-of")],
    *[("headers", name) for name in _HEADERS.split()],
    *[("properties", name) for name in _PROPERTIES.split()],
    *[("properties", "delivery_info", name) for name in ("exchange", "routing_key")],
)

_TEXTS = st.text(max_size=20) | st.sampled_from(
    ["millrace", "millrace.plan", "millrace.submit", "millrace.run_shard", "utf-8", "base64", "2020-01-01T00:00:00",
     "9999-01-01T00:00:00Z", "s0-00000000-0000-7000-8000-000000000000", "\ud800", "\0"]
)  # fmt: skip
_NUMBERS = st.integers(-(2**70), 2**70) | st.floats() | st.sampled_from([10**400, -1, 1e308, float("nan")])
_SCALARS = st.none() | st.booleans() | _NUMBERS | _TEXTS
_VALUES: st.SearchStrategy[Any] = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=4), max_leaves=8
)
_DEPTHS = st.integers(1, 20_000)  # Python gives up at some 1,000


def body(value: object) -> str:
    """A value as the body of a frame."""
    return encoded(json.dumps(value).encode())


def encoded(data: bytes) -> str:
    """Bytes as the body of a frame."""
    return base64.b64encode(data).decode()


_BODIES = (
    st.builds(body, _VALUES)
    | st.builds(body, st.tuples(st.lists(_VALUES, max_size=3), st.dictionaries(_TEXTS, _VALUES, max_size=3), _VALUES))
    | st.builds(encoded, st.binary(max_size=40))
    | st.builds(lambda depth: encoded(b"[" * depth + b"]" * depth), _DEPTHS)
)
_CHANGES = st.tuples(st.sampled_from(PATHS), st.just("drop") | st.tuples(_VALUES)) | st.tuples(
    st.just(("body",)), st.tuples(_BODIES)
)

STEPS_BEFORE_DEATH = 3

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
        self._server = server
        self._sizes: deque[tuple[float, int]] = deque([(time.monotonic(), self.num_bytes)], maxlen=HISTORY_LENGTH)

    @property
    def num_bytes(self) -> int:
        """How long the file is now: Redis writes before it answers."""
        return self._file.stat().st_size

    def run(self, stopping: threading.Event) -> None:
        """Note it until told to stop."""
        while not stopping.wait(HISTORY_STEP_S):
            self._sizes.append((time.monotonic(), self.num_bytes))

    def cut(self, seconds: float, *, down_s: float = 0.0) -> int:
        """Kill Redis and start it `down_s` later with its file of so many seconds ago; how many bytes it has lost."""
        past_s = time.monotonic() - seconds
        past = next((size for at_s, size in reversed(list(self._sizes)) if at_s <= past_s), self._sizes[0][1])
        return self.cut_to(past, down_s=down_s)

    def cut_to(self, num_bytes: int, *, down_s: float = 0.0) -> int:
        """Likewise with a file of at most this length.

        Redis takes back all that a command or script wrote if the cut goes through it.
        """
        self._server.kill()
        kept = min(self.num_bytes, num_bytes)
        lost = self.num_bytes - kept
        os.truncate(self._file, kept)
        time.sleep(down_s)
        self._server.start()
        self._sizes.clear()  # what is written now has another past
        self._sizes.append((time.monotonic(), self.num_bytes))
        return lost

    @property
    def _file(self) -> Path:
        """From Redis 7 on the increment of several files."""
        files = self._server.directory.rglob("*.aof")
        return max(files, key=lambda path: (path.name.endswith(".incr.aof"), path.name))


@contextmanager
def file_history(server: RestartableRedis) -> Iterator[FileHistory]:
    """The history of a durable server's file, noted for the length of the block."""
    history = FileHistory(server)
    with running_thread(history.run):
        yield history


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


def valid_frame(client: BatchClient, bare: redis.Redis) -> Frame:
    """The frame of a plan, as our own client sends it. Empties Redis."""
    client.submit([b"{}"])
    frame: Frame = json.loads(bare.lrange(PLAN_LANE, 0, 0)[0])
    bare.flushall()
    return frame


def spoiled(template: Frame, spoil: Spoil, name: str) -> bytes:
    """The template, spoiled, with `name` for its delivery tag and task id."""
    frame = copy.deepcopy(template)
    frame["properties"]["delivery_tag"] = frame["headers"]["id"] = name
    spoil(frame)
    return json.dumps(frame).encode()


def put(*path: str, to: object) -> Spoil:
    """Replace, or add, the value at `path`."""

    def change(frame: Frame) -> None:
        target = frame
        for name in path[:-1]:
            target = target[name]
        target[path[-1]] = to

    return change


def drop(*path: str) -> Spoil:
    """Remove the value at `path`."""

    def change(frame: Frame) -> None:
        target = frame
        for name in path[:-1]:
            target = target[name]
        del target[path[-1]]

    return change


# With stock Celery 5.7 and kombu 5.7 the first four end the worker and the next three one worker after another; a
# missing id makes it reconnect for ever, the next four once; the last keeps a slot until the year 9999.
TWENTY_THREE: dict[str, bytes | Spoil] = {
    "not JSON": b"not JSON",
    "empty": b"",
    "null": b"null",
    "a list": b"[]",
    "body not base64": put("body", to="*** not base64 ***"),
    "body an object": put("body", to=body({"args": []})),
    "body of two": put("body", to=body([[], {}])),
    "no id": drop("headers", "id"),
    "no properties": drop("properties"),
    "properties null": put("properties", to=None),
    "no delivery tag": drop("properties", "delivery_tag"),
    "no delivery info": drop("properties", "delivery_info"),
    "no body": drop("body"),
    "body encoding unknown": put("properties", "body_encoding", to="rot13"),
    "no headers": drop("headers"),
    "headers a list": put("headers", to=[]),
    "no task": drop("headers", "task"),
    "body not JSON": put("body", to=encoded(b"not JSON")),
    "body not UTF-8": put("body", to=encoded(b'["\xff\xfe"]')),
    "body 200,000 deep": put("body", to=encoded(b"[" * 200_000)),
    "pickle": put("content-type", to="application/x-python-serialize"),
    "unknown task": put("headers", "task", to="os.system"),
    "ETA no time": put("headers", "eta", to="yesterday"),
}
assert len(TWENTY_THREE) == 23
# Well-formed, but not ours: no message of ours has an ETA.
FAR_FUTURE = put("headers", "eta", to="9999-12-31T23:59:59+00:00")


def fuzzed_frames(template: Frame, count: int) -> list[bytes]:
    """`count` different frames, the same each time: most are the template, spoiled in one to three places."""
    # Fewer tags than frames, so that some come under a tag that is being worked on.
    tags = st.integers(0, 999).map("frame-{}".format)
    changed = st.builds(_changed, st.just(template), tags, st.lists(_CHANGES, min_size=1, max_size=3))
    frames = st.one_of(
        changed,
        changed,
        changed,
        changed,
        st.tuples(changed, st.floats(0, 1)).map(lambda cut: cut[0][: int(len(cut[0]) * cut[1])]),
        _VALUES.map(_dumped),
        st.binary(max_size=200),
        _DEPTHS.map(lambda depth: b'{"a":' * depth),
    )
    found: dict[bytes, None] = {}

    @settings(
        max_examples=round(count * SURPLUS),
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(frames)
    def collect(frame: bytes) -> None:
        found[frame] = None

    collect()
    return list(found)[:count]


def _changed(template: Frame, tag: str, changes: list[tuple[tuple[str, ...], Any]]) -> bytes:
    frame = copy.deepcopy(template)
    frame["properties"]["delivery_tag"] = frame["headers"]["id"] = tag
    for path, change in changes:
        target: Any = frame
        for name in path[:-1]:
            target = target.get(name) if isinstance(target, dict) else None
        if not isinstance(target, dict):
            continue  # an earlier change took it away
        if change == "drop":
            target.pop(path[-1], None)
        else:
            target[path[-1]] = change[0]
    return _dumped(frame)


def _dumped(value: object) -> bytes:
    return json.dumps(value).encode()


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
