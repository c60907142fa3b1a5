"""A job that nobody waits for any more, before it is one."""

from __future__ import annotations


class SubmitAbandoned(Exception):
    """Whoever wanted the job does not wait for it any more."""
