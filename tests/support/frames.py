"""Frames of the broker's lists, and ways to spoil them."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable
from typing import Any

import redis

from worker.client import BatchClient

PLAN_LANE = "millrace"
Frame = dict[str, Any]
Spoil = Callable[[Frame], None]


def valid_frame(client: BatchClient, bare: redis.Redis) -> Frame:
    """The frame of a plan, as our own client sends it. Empties Redis."""
    client.submit([b"{}"])
    frame: Frame = json.loads(bare.lrange(PLAN_LANE, 0, 0)[0])
    bare.flushall()
    return frame


def spoiled(template: Frame, spoil: Spoil, name: str) -> bytes:
    """The template under a delivery tag and a task id of its own, spoiled."""
    frame = copy.deepcopy(template)
    frame["properties"]["delivery_tag"] = frame["headers"]["id"] = name
    spoil(frame)
    return json.dumps(frame).encode()


def body(value: object) -> str:
    """A value as the body of a frame."""
    return encoded(json.dumps(value).encode())


def encoded(data: bytes) -> str:
    """Bytes as the body of a frame."""
    return base64.b64encode(data).decode()


def put(*path: str, to: object) -> Spoil:
    """Replaces, or adds, what is at `path`."""

    def change(frame: Frame) -> None:
        target = frame
        for name in path[:-1]:
            target = target[name]
        target[path[-1]] = to

    return change


def drop(*path: str) -> Spoil:
    """Removes what is at `path`."""

    def change(frame: Frame) -> None:
        target = frame
        for name in path[:-1]:
            target = target[name]
        del target[path[-1]]

    return change


# With stock Celery 5.7 and kombu 5.7: the first four end the worker, the next three end one worker after another, a
# missing id makes it reconnect for ever, the next four reconnect it once; the last keeps its slot until the year 9999.
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
# Well-formed, and not for us either: no message of ours has an ETA.
FAR_FUTURE = put("headers", "eta", to="9999-12-31T23:59:59+00:00")
