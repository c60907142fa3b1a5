"""Frames that nobody thought of."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.frames import Frame, body, encoded

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
_BODIES = (
    st.builds(body, _VALUES)
    | st.builds(body, st.tuples(st.lists(_VALUES, max_size=3), st.dictionaries(_TEXTS, _VALUES, max_size=3), _VALUES))
    | st.builds(encoded, st.binary(max_size=40))
    | st.builds(lambda depth: encoded(b"[" * depth + b"]" * depth), _DEPTHS)
)
_CHANGES = st.tuples(st.sampled_from(PATHS), st.just("drop") | st.tuples(_VALUES)) | st.tuples(
    st.just(("body",)), st.tuples(_BODIES)
)


def fuzzed_frames(template: Frame, count: int) -> list[bytes]:
    """The same `count` different frames each time: for the most part the template, spoiled in one to three places."""
    # Not one for each, so that some frames come under a tag that is being worked on.
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
