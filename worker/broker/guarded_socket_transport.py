"""The guarded transport over a Unix socket."""

from __future__ import annotations

from worker.broker.guarded_transport import GuardedTransport


class GuardedSocketTransport(GuardedTransport):
    """Takes `socket:///path?virtual_host=db`, which kombu's channel reads and its connection must not take apart."""

    can_parse_url = True
