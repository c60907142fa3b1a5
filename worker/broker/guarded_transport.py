"""kombu's Redis transport with the guarded channel."""

from __future__ import annotations

from kombu.transport.redis import Transport

from worker.broker.guarded_channel import GuardedChannel


class GuardedTransport(Transport):  # type: ignore[misc]  # kombu has no types
    """Named by `broker_transport`, so that no table of kombu's has to be changed."""

    Channel = GuardedChannel
