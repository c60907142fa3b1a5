"""Keys of `millrace serve`: Redis holds their digests, and whose each is.

A key is 256 random bits, so its SHA-256 cannot be turned back, and a search for one by how long a look-up takes would
have to guess the digest of a key, not the key.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import redis

from worker.registry.errors import KeyUnknown
from worker.registry.exchange import Exchange, text, text_fields
from worker.registry.keys import Keys

PREFIX = "mr-"  # by which scanners for leaked keys may know one
_RANDOM_BYTES = 32
_ID_DIGITS = 12  # of the digest, by which people name a key
# A field beside the digests, there once a key was revoked: without it the last key's end would open the server.
_REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """What is known of a key. The key itself is shown once, when it is made."""

    id: str
    tenant: str | None  # whose files and jobs it sees; None: it reads metrics alone
    name: str  # a note of whoever made it
    created_at: int  # Unix seconds

    @classmethod
    def of(cls, digest: str, entry: str) -> Self:
        """The key of an entry in Redis."""
        known = json.loads(entry)
        return cls(digest[:_ID_DIGITS], known["tenant"], known["name"], known["created_at"])


def digest_of(key: str) -> str:
    """Under what Redis has a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def look(keys: Keys, key: str | None) -> Exchange[tuple[KeyEntry | None, bool]]:
    """What is known of `key`, and whether there are keys, or were ones that are revoked."""
    digest = digest_of(key or "")
    entry, num_keys = yield [("HGET", keys.api_keys, digest), ("HLEN", keys.api_keys)]
    return (None if entry is None or key is None else KeyEntry.of(digest, text(entry))), bool(num_keys)


class ApiKeys:
    """Makes, lists and revokes keys. Methods raise redis.RedisError when Redis cannot be had."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    def create(self, tenant: str | None, name: str) -> tuple[KeyEntry, str]:
        """A new key, and its text, which is nowhere else."""
        key = f"{PREFIX}{secrets.token_urlsafe(_RANDOM_BYTES)}"
        digest = digest_of(key)
        entry = KeyEntry(digest[:_ID_DIGITS], tenant, name, int(time.time()))
        known = {"tenant": tenant, "name": name, "created_at": entry.created_at}
        self._client.hset(self._keys.api_keys, digest, json.dumps(known))
        return entry, key

    def all(self) -> list[KeyEntry]:
        """All keys, the oldest first."""
        found = [KeyEntry.of(digest, entry) for digest, entry in self._entries().items()]
        return sorted(found, key=lambda key: (key.created_at, key.id))

    def revoke(self, key_id: str) -> KeyEntry:
        """Forget a key; its next request is refused. Raises KeyUnknown."""
        for found in self._forget(lambda key: key.id == key_id):
            return found
        raise KeyUnknown(key_id)

    def revoke_all_of(self, tenant: str) -> list[KeyEntry]:
        """Forget every key of a tenant."""
        return self._forget(lambda key: key.tenant == tenant)

    def _forget(self, picks: Callable[[KeyEntry], bool]) -> list[KeyEntry]:
        """Those of the picked keys that were there still."""
        picked = [
            (digest, key) for digest, entry in self._entries().items() if picks(key := KeyEntry.of(digest, entry))
        ]
        if picked:
            self._client.hset(self._keys.api_keys, _REVOKED, "1")  # first: no moment is without a field
        return [key for digest, key in picked if self._client.hdel(self._keys.api_keys, digest)]

    def _entries(self) -> dict[str, str]:
        entries = text_fields(self._client.hgetall(self._keys.api_keys))
        return {digest: entry for digest, entry in entries.items() if digest != _REVOKED}
