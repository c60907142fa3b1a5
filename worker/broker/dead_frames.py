"""Frames from the queue that were no message, kept for whoever wants to know who sent them."""

from __future__ import annotations

import logging

import redis

from worker.broker.untyped import Untyped
from worker.registry.keys import Keys

MAX_FRAME_BYTES = 4096  # of a frame, the rest is cut
MAX_FRAMES = 1000  # the newest

logger = logging.getLogger(__name__)


def bury(channel: Untyped, frame: object) -> None:
    """Put the beginning of a frame on the dead list. Never raises: losing a bad frame is no reason to stop."""
    data = frame if isinstance(frame, bytes) else str(frame).encode("utf-8", "backslashreplace")
    keys = Keys()
    try:
        with channel.conn_or_acquire() as client:
            client.hincrby(keys.admission, "frames", 1)
            client.lpush(keys.dead_frames, data[:MAX_FRAME_BYTES])
            client.ltrim(keys.dead_frames, 0, MAX_FRAMES - 1)
    except (redis.RedisError, OSError) as error:
        logger.warning("a bad frame of %d bytes was dropped: %s", len(data), error)
