"""Tells by the key of a request whose it is, what it may see, and how much of a kind may be under way."""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from redis.asyncio import Redis as AsyncRedis
from starlette.requests import Request

from worker.registry.api_keys import KeyEntry, look
from worker.registry.exchange import perform_async
from worker.registry.keys import Keys
from worker.serve.errors import ApiError, KeyRefused, NotAllowed, TooMuch

OPEN_TENANT = "default"  # of whoever asks a server without keys, which is on this machine

WRONG_KEY_DELAY_S = 1.0
MAX_DELAYED = 100  # answers to wrong keys that wait at once: beyond, the answer is to come back later


class Gate:
    """Lets requests in that have a key; without any key in Redis those of this machine, if it listens to no other."""

    def __init__(self, client: AsyncRedis, keys: Keys, host: str) -> None:
        """`host`: the address that is listened on."""
        self._client = client
        self._keys = keys
        self._is_local = is_this_machine(host)
        self._num_delayed = 0

    async def tenant_of(self, request: Request) -> str:
        """Whose files and jobs the request may see. Raises KeyRefused, NotAllowed, TooMuch, redis.RedisError."""
        return await self.tenant_with(request, _key_of(request))

    async def tenant_with(self, request: Request, key: str | None) -> str:
        """`tenant_of` for a request that brings its key some other way."""
        entry = await self._entry_of(request, key)
        if entry is None:
            return OPEN_TENANT
        if entry.tenant is None:
            raise NotAllowed("this key reads /metrics alone")
        return entry.tenant

    async def check_may_read_metrics(self, request: Request) -> None:
        """Raise what `tenant_of` raises, unless the key is for metrics: they tell of all tenants."""
        entry = await self._entry_of(request, _key_of(request))
        if entry is not None and entry.tenant is not None:
            raise NotAllowed("metrics tell of all tenants; accepted: a key of `millrace keys create --metrics`")

    async def _entry_of(self, request: Request, key: str | None) -> KeyEntry | None:
        """The key's entry; None where no key is needed."""
        entry, are_keys = await perform_async(self._client, look(self._keys, key))
        if entry is not None:
            return entry
        if not are_keys and self._is_local:
            _refuse_other_sites(request)
            return None
        if key is not None:
            await self._slow_down()
        raise KeyRefused(
            "no key was given; accepted: Authorization: Bearer KEY" if key is None else "the key is not known"
        )

    async def _slow_down(self) -> None:
        if self._num_delayed >= MAX_DELAYED:
            raise TooMuch("too many requests with wrong keys", "wrong_keys", WRONG_KEY_DELAY_S)
        self._num_delayed += 1
        try:
            await asyncio.sleep(WRONG_KEY_DELAY_S)
        finally:
            self._num_delayed -= 1


class Slots:
    """A bounded number of places, of which one tenant has at most half (rounded up)."""

    def __init__(self, kind: str, most: int) -> None:
        """`kind`: what takes a place, as in the setting serve.max_KIND."""
        self._kind = kind
        self._most = most
        self._taken: Counter[str] = Counter()  # by tenant

    @contextmanager
    def taken(self, tenant: str) -> Iterator[None]:
        """Have a place. Raises TooMuch where there is none."""
        setting, code = f"serve.max_{self._kind}", f"too_many_{self._kind}"
        if self._taken.total() >= self._most:
            raise TooMuch(f"{self._most} {self._kind} are under way ({setting})", code, 1.0)
        if self._taken[tenant] >= (self._most + 1) // 2:
            told = f"{self._taken[tenant]} {self._kind} of the tenant are under way (half of {setting})"
            raise TooMuch(told, code, 1.0)
        self._taken[tenant] += 1
        try:
            yield
        finally:
            self._taken[tenant] -= 1
            self._taken += Counter()  # which drops tenants without any


def is_this_machine(host: str) -> bool:
    """Whether the address, or localhost, is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _key_of(request: Request) -> str | None:
    given = request.headers.getlist("authorization")
    if not given:
        return None
    scheme, _, key = given[0].partition(" ")
    if len(given) > 1 or scheme.lower() != "bearer" or not key:
        raise KeyRefused("the Authorization header is not understood; accepted: Bearer KEY")
    return key.strip()


def check_same_site(request: Request) -> None:
    """Raise NotAllowed for what a page of another site, also of a sibling of this one, has a browser send.

    A browser says of each POST where it comes from; the scheme is not compared, as a proxy may be where TLS ends.
    """
    hosts, origins = request.headers.getlist("host"), request.headers.getlist("origin")
    try:
        places = [urlsplit(origin).netloc for origin in origins]
    except ValueError:
        places = []
    fetched = request.headers.getlist("sec-fetch-site")
    if len(hosts) != 1 or places != hosts or any(site != "same-origin" for site in fetched):
        raise NotAllowed("the request does not come from a page of this server")


def _refuse_other_sites(request: Request) -> None:
    """Refuse what a page of another site has a browser on this machine send, also under a name of its own for it."""
    hosts, origins = request.headers.getlist("host"), request.headers.getlist("origin")
    try:
        names = [urlsplit(f"//{host}").hostname or "" for host in hosts]
    except ValueError:
        names = [""]
    if len(hosts) != 1 or not is_this_machine(names[0]):
        raise ApiError("the Host header names another machine; accepted: localhost, or make a key", status=421)
    if any(origin != f"{request.url.scheme}://{hosts[0]}" for origin in origins):
        raise NotAllowed("the request comes from a page of another site")
