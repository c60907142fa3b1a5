"""Equal requests are computed once."""

from __future__ import annotations

import hashlib
from array import array

from engine.request import Request
from engine.scheduling.request_group import RequestGroup

KEY_BYTES = 16


class Duplicates:
    """Finds the unfinished group whose tokens a new request would get as well.

    That is one of the same tenant with the same prompt and parameters, greedy or with an explicit seed: other draws are
    each request's own. One digest for each unfinished group is kept.
    """

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._groups: dict[bytes, RequestGroup] = {}

    def key_of(self, request: Request) -> bytes | None:
        """Names a request's tokens; None where no other request may get them, or with `engine.deduplicate` off."""
        params = request.params
        if not self._is_on or not (params.is_greedy or params.seed is not None):
            return None
        digest = hashlib.blake2b(array("q", request.prompt_token_ids).tobytes(), digest_size=KEY_BYTES)
        digest.update(repr((request.tenant, params)).encode("utf-8", "surrogatepass"))
        return digest.digest()

    def find(self, key: bytes | None) -> RequestGroup | None:
        """The unfinished group of this key."""
        return None if key is None else self._groups.get(key)

    def add(self, group: RequestGroup) -> None:
        """A group began: later requests of its key may join it."""
        if group.key is not None:
            self._groups[group.key] = group

    def forget(self, group: RequestGroup) -> None:
        """A group ended."""
        if group.key is not None:
            del self._groups[group.key]
