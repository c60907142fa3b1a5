"""A kombu channel that no frame can stop."""

from __future__ import annotations

import logging

from kombu.transport.redis import Channel
from redis.exceptions import DataError

from worker.broker.dead_frames import bury
from worker.broker.untyped import Untyped

logger = logging.getLogger(__name__)

# What decoding and delivering a malformed frame raises; errors of the connection are none of these. DataError: redis-py
# refuses to send what the frame calls its delivery tag.
_FRAME_ERRORS = (ValueError, TypeError, AttributeError, LookupError, RecursionError, DataError)


class GuardedChannel(Channel):  # type: ignore[misc]  # kombu has no types
    """Puts a frame that is no message on the dead list, where kombu would raise and so stop the worker."""

    num_answers = 0  # to BRPOP, with a message or without
    _last_frame: bytes | None = None  # what BRPOP returned last

    def _create_client(self, asynchronous: bool = False) -> Untyped:
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
