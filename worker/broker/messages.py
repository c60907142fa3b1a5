"""Sends the messages that say where work is, and receives them over a kombu transport that no frame can stop.

Frames that are no messages are kept, so that their sender can be found.
"""

from __future__ import annotations

import logging
from enum import Enum

import redis
from celery import Celery
from kombu import Exchange, Queue
from kombu.exceptions import OperationalError
from kombu.transport.redis import Channel, Transport
from redis.exceptions import DataError

from worker.registry.exchange import Untyped
from worker.registry.keys import Keys, UnitRef
from worker.registry.queues import PLAN_PRIORITY, queue_of

PLAN_TASK = "millrace.plan"
RUN_SHARD_TASK = "millrace.run_shard"

logger = logging.getLogger(__name__)

# What decoding and delivering a malformed frame raises; errors of the connection are none of these. DataError: redis-py
# refuses to send what the frame calls its delivery tag.
_FRAME_ERRORS = (ValueError, TypeError, AttributeError, LookupError, RecursionError, DataError)

# Ours have 1 kB, a producer's submit with all of its metadata 16. What is compressed unpacks to any size: a frame of
# 1.2 MB took a worker from 305 to 2,111 MiB.
MAX_MESSAGE_BYTES = 64 * 1024
_COMPRESSION = b'"compression"'  # a header; inside a text of the frame its quotes would be escaped

MAX_FRAME_BYTES = 4096  # of a frame, the rest is cut
MAX_FRAMES = 1000  # the newest
FRAMES_TTL_S = 604_800  # a week after the last


def message_queue(model: str) -> Queue:
    """Where the messages of a model's shards go; "": those of plans."""
    name = queue_of(model)
    return Queue(name, Exchange(name, type="direct"), routing_key=name)


class Announcer:
    """Publishes the message of a unit. A message is a hint: one that cannot be sent is sent later by a reaper."""

    def __init__(self, app: Celery) -> None:
        self._app = app

    def announce(self, ref: UnitRef, priority: int, model: str = "") -> None:
        """Tell some worker to look at a unit of a job of this priority; `model`: a shard's."""
        task, arguments = (PLAN_TASK, [ref.job_id]) if ref.is_plan else (RUN_SHARD_TASK, [ref.job_id, int(ref.unit)])
        priority = PLAN_PRIORITY if ref.is_plan else priority
        try:
            self._app.send_task(task, args=arguments, queue=message_queue(model), priority=priority)
        except (OperationalError, redis.RedisError, OSError) as error:
            logger.warning("a unit could not be announced, a reaper will: %s", error, extra=ref.log_fields)


def send_task_to(app: Celery, queue: str, task: str, task_id: str, argument: object) -> None:
    """Send a task of other programs, which have this Redis as their broker, with one argument that is JSON.

    Raises kombu's OperationalError, redis.RedisError and OSError.
    """
    bound = Queue(queue, Exchange(queue, type="direct"), routing_key=queue)
    # The lane of priority 0 is the list of the queue's own name: whatever lanes its workers know, they know this one.
    app.send_task(task, args=[argument], task_id=task_id, queue=bound, priority=0)


class MessageEnd(Enum):
    """What becomes of a Celery message when its task is over."""

    DONE = "done"  # acknowledge it: its unit is finished, or somebody else's
    REQUEUE = "requeue"  # put it back: its unit, or the job it submits, waits for a worker


class GuardedChannel(Channel):  # type: ignore[misc]  # kombu has no types
    """Puts a frame that is no message on the dead list, where kombu would raise and so stop the worker."""

    num_answers = 0  # to BRPOP, with a message or without
    _last_frame: bytes | None = None  # what BRPOP returned last

    def _create_client(self, asynchronous: bool = False) -> Untyped:
        if self.connection is None:
            # A reset while a queue is declared has kombu close this channel, and publish on it all the same. With this
            # error it opens another; its own, an AttributeError, ended a worker whose reaper announced, with code 70.
            raise redis.ConnectionError("the channel is closed")
        client = super()._create_client(asynchronous=asynchronous)
        if asynchronous:
            self._remember_frames(client)
        return client

    def _remember_frames(self, client: Untyped) -> None:
        parse_response = client.parse_response

        def parse_and_remember(connection: Untyped, command_name: str, **options: Untyped) -> Untyped:
            reply = parse_response(connection, command_name, **options)
            if command_name == "BRPOP":
                self.num_answers += 1
            self._last_frame = reply[1] if command_name == "BRPOP" and reply else None
            if self._last_frame is not None:
                _check_frame(self._last_frame)
            return reply

        client.parse_response = parse_and_remember

    def _brpop_read(self, **options: Untyped) -> Untyped:
        self._last_frame = None
        try:
            return super()._brpop_read(**options)
        except _FRAME_ERRORS as error:
            self._bury_or_raise(error)
            return True

    def _bury_or_raise(self, error: Exception) -> None:
        if self._last_frame is None:  # nothing was popped: not a frame's fault
            raise error
        logger.error("a frame is no message and was put on the dead list: %s", type(error).__name__)
        bury(self, self._last_frame)


class GuardedTransport(Transport):  # type: ignore[misc]  # kombu has no types
    """Named by `broker_transport`, so that no table of kombu's has to be changed."""

    Channel = GuardedChannel


class GuardedSocketTransport(GuardedTransport):
    """Takes `socket:///path?virtual_host=db`, which kombu's channel reads and its connection must not take apart."""

    can_parse_url = True


def _check_frame(frame: bytes) -> None:
    """Raise ValueError for a frame that nothing of ours sends and that is not to be unpacked."""
    if len(frame) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a frame of {len(frame)} bytes; accepted: at most {MAX_MESSAGE_BYTES}")
    if _COMPRESSION in frame:
        raise ValueError("a compressed frame; accepted: plain ones")


def bury(channel: Untyped, frame: object) -> None:
    """Put the beginning of a frame on the dead list. Never raises: losing a bad frame is no reason to stop."""
    data = frame if isinstance(frame, bytes) else str(frame).encode("utf-8", "backslashreplace")
    keys = Keys()
    try:
        with channel.conn_or_acquire() as client:
            client.hincrby(keys.counters, "frames", 1)
            client.lpush(keys.dead_frames, data[:MAX_FRAME_BYTES])
            client.ltrim(keys.dead_frames, 0, MAX_FRAMES - 1)
            client.expire(keys.dead_frames, FRAMES_TTL_S)
    except (redis.RedisError, OSError) as error:
        logger.warning("a bad frame of %d bytes was dropped: %s", len(data), error)
