"""Posts an event to a URL: signed as standardwebhooks says, to an address that was checked, following no redirects.

The address is checked where it is used: the one that the connection is made to, so a name that means another address a
moment later leads nowhere else. Environment variables for proxies are not read.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import re
import socket
import ssl
import time

from settings.callbacks import read_secret
from worker.registry.callbacks import CallbackEvent, CallbackTarget

MAX_HEAD_BYTES = 16 * 1024  # of an answer; what comes after its status is not read

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})(?: [^\r\n]*)?\r?\n")

_IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class DeliveryFailed(Exception):
    """A receiver did not take an event; the message says why, in words of ours."""


class _Deadline:
    """The time until which everything has to be done."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._ends_at_s = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Seconds that are left. Raises DeliveryFailed if none are."""
        left_s = self._ends_at_s - time.monotonic()
        if left_s <= 0:
            raise DeliveryFailed(f"no answer within {self._timeout_s:g} s (callbacks.timeout_s)")
        return left_s


def is_public(address: str) -> bool:
    """Whether an IP address belongs to no private network, also by an IPv4 address that is written inside it."""
    found: _IPAddress = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found in _NAT64:
            found = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        else:
            found = found.ipv4_mapped or found.sixtofour or found
            if found.version == 6 and found.is_site_local:  # which counts as global
                return False
    return found.is_global and not (found.is_multicast or found.is_reserved or found.is_unspecified)


def signed_headers(event: CallbackEvent, secret: str, at_s: int) -> dict[str, str]:
    """The headers by which a receiver knows the event and who sent it. Raises ValueError for what is no secret."""
    signed = f"{event.id}.{at_s}.".encode("ascii") + event.body
    digest = hmac.new(read_secret(secret), signed, hashlib.sha256).digest()
    return {
        "webhook-id": event.id,
        "webhook-timestamp": str(at_s),
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }


def post(event: CallbackEvent, target: CallbackTarget, *, secret: str, timeout_s: float) -> None:
    """Send the event to the target's URL, and be told that it was taken: by a status of 200 to 299.

    Looking the host up is bounded by the resolver alone. Raises DeliveryFailed.
    """
    headers = {
        "Host": _host_header(target),
        "Content-Type": "application/json",
        "Content-Length": str(len(event.body)),
        "User-Agent": "millrace",
        "Connection": "close",
        **signed_headers(event, secret, int(time.time())),
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    request = f"POST {target.path} HTTP/1.1\r\n{head}\r\n".encode("ascii") + event.body
    deadline = _Deadline(timeout_s)
    try:
        with _connected(target, deadline) as connection:
            connection.settimeout(deadline.left_s())
            connection.sendall(request)
            status = _read_status(connection, deadline)
    except TimeoutError:
        raise DeliveryFailed(f"no answer within {timeout_s:g} s (callbacks.timeout_s)") from None
    except ssl.SSLError as error:
        raise DeliveryFailed(f"TLS: {error.reason or error}") from error
    except OSError as error:
        raise DeliveryFailed(f"the connection failed: {error.strerror or error}") from error
    if 300 <= status < 400:
        raise DeliveryFailed(f"answered {status}: redirects are not followed")
    if not 200 <= status < 300:
        raise DeliveryFailed(f"answered {status}")


def _host_header(target: CallbackTarget) -> str:
    host = f"[{target.host}]" if ":" in target.host else target.host
    return host if target.port == (443 if target.is_tls else 80) else f"{host}:{target.port}"


def _connected(target: CallbackTarget, deadline: _Deadline) -> socket.socket:
    """A connection to one of the host's addresses that may be used. Raises OSError, DeliveryFailed."""
    try:
        found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise DeliveryFailed(f"the host is not found: {error}") from error
    usable = [entry for entry in found if target.may_be_private or is_public(str(entry[4][0]))]
    if not usable:
        raise DeliveryFailed("the host has addresses of a private network alone (limits.callback_private_hosts)")
    failure: OSError = OSError("no address")
    for family, kind, protocol, _, address in usable:
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(deadline.left_s())
            connection.connect(address)
            connection.settimeout(deadline.left_s())
            return _encrypted(connection, target) if target.is_tls else connection
        except OSError as error:
            connection.close()
            failure = error
        except BaseException:
            connection.close()
            raise
    raise failure


def _encrypted(connection: socket.socket, target: CallbackTarget) -> socket.socket:
    context = ssl.create_default_context()  # whom this machine trusts, or SSL_CERT_FILE names
    return context.wrap_socket(connection, server_hostname=target.host)


def _read_status(connection: socket.socket, deadline: _Deadline) -> int:
    """The status of the answer, of those that say more is to come the one behind them. Raises DeliveryFailed."""
    head = b""
    while len(head) < MAX_HEAD_BYTES:
        match = _STATUS.match(head)
        if match is not None and match[1][:1] != b"1":
            return int(match[1])
        if match is not None and b"\r\n\r\n" in head:  # 100 Continue and its like
            head = head.partition(b"\r\n\r\n")[2]
            continue
        connection.settimeout(deadline.left_s())
        part = connection.recv(4096)
        if not part:
            raise DeliveryFailed("the answer breaks off" if head else "the connection was closed without an answer")
        head += part
    raise DeliveryFailed("the answer is not HTTP")
