"""Frames of the broker's lists that are no messages of ours: spoiled in 23 known ways, or as hypothesis finds them."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable
from typing import Any

import redis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from worker.client import BatchClient

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
