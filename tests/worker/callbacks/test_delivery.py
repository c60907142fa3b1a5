"""Whom a job's on_done may name, and what is sent there: to which addresses, how signed, and what receivers do."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from openai import OpenAI
from openai.types.webhooks import BatchCompletedWebhookEvent
from standardwebhooks import Webhook, WebhookVerificationError

from settings import LimitSettings, SettingsError, load_settings
from tests.support.http_servers import Receiver, receiving
from worker.callbacks.delivery import DeliveryFailed, is_public, post
from worker.registry.callbacks import CallbackEvent, CallbackTarget
from worker.registry.errors import InvalidOption
from worker.registry.intake import checked_options

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
JOB = "s0-0198c0de-0000-7000-8000-000000000000"
EVENT = CallbackEvent(
    id=f"evt_{JOB}_1790000000000",
    job_id=JOB,
    target="",
    tenant="default",
    state="completed",
    created_at=1_790_000_000,
    counts={"total": 3, "completed": 2, "failed": 1},
    tries=1,
    error="",
)
LIMITS = LimitSettings(
    callback_hosts="hooks.example.com, *.example.org, other.example.com:8443",
    callback_private_hosts="10.0.0.5:8080,[::1]:9000",
    callback_queues="done",
)

ALLOWED: dict[str, dict[str, Any]] = {
    "https://hooks.example.com": {"host": "hooks.example.com", "port": 443, "path": "/", "is_tls": True},
    "https://HOOKS.example.com:443/a?b=c": {"host": "hooks.example.com", "path": "/a?b=c", "may_be_private": False},
    "https://a.b.example.org/": {"host": "a.b.example.org"},
    "https://other.example.com:8443/x": {"port": 8443},
    "http://10.0.0.5:8080/x": {"is_tls": False, "may_be_private": True, "port": 8080},
    "https://[::1]:9000/": {"host": "::1", "may_be_private": True},
    "task:shop.on_batch@done": {"task": "shop.on_batch", "queue": "done"},
}
REFUSED = [
    "http://hooks.example.com/",  # not encrypted
    "https://hooks.example.com:8443/",  # another port
    "https://example.org/",  # not below it
    "https://evilexample.org/",
    "https://hooks.example.com.evil.net/",
    "https://user@hooks.example.com/",
    "https://evil.net@hooks.example.com/",
    "https://hooks.example.com\\@evil.net/",
    "https://hooks.example.com/#x",
    "https://hooks.example.com:99999/",
    "http://10.0.0.5/",
    "http://[::1/",
    "https://",
    "task:shop.on_batch@millrace",
    "task:shop.on_batch@other",
    "task:@done",
    "task:x@",
]
MALFORMED = ["ftp://hooks.example.com/", "hooks.example.com", "https://a b", "task:x", "https://x/\n", "h" * 513, "", 7]


@pytest.mark.parametrize("on_done", ALLOWED)
def test_what_the_limits_name_is_allowed(on_done: str) -> None:
    checked_options({"on_done": on_done})
    target = CallbackTarget.checked(on_done, LIMITS)
    for name, value in ALLOWED[on_done].items():
        assert getattr(target, name) == value


@pytest.mark.parametrize("on_done", REFUSED)
def test_what_the_limits_do_not_name_is_refused(on_done: str) -> None:
    with pytest.raises(InvalidOption, match=r"^on_done .*; accepted: "):
        CallbackTarget.checked(on_done, LIMITS)


@pytest.mark.parametrize("on_done", ALLOWED)
def test_without_limits_nothing_is_allowed(on_done: str) -> None:
    with pytest.raises(InvalidOption):
        CallbackTarget.checked(on_done, LimitSettings())


@pytest.mark.parametrize("on_done", MALFORMED)
def test_what_has_no_form_of_a_target_is_no_option(on_done: object) -> None:
    with pytest.raises(InvalidOption, match="on_done"):
        checked_options({"on_done": on_done})


@pytest.mark.parametrize("on_done", ["https://me:hunter2@a.example/ x", "http//hooks.example/hunter2", ["hunter2"]])
def test_a_refusal_does_not_tell_what_was_given(on_done: object) -> None:
    with pytest.raises(InvalidOption, match="on_done") as caught:
        checked_options({"on_done": on_done})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "entry", ["*.", "*", "*.*.com", "https://a.com", "a.com/x", "a.com:", "a.com:0", "::1", "a.com?x"]
)
@pytest.mark.parametrize("key", ["limits.callback_hosts", "limits.callback_private_hosts"])
def test_an_entry_that_is_no_host_is_refused(key: str, entry: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings({key: f"hooks.example.com,{entry}"}, environ={})
    assert f"{key}=hooks.example.com,{entry}: accepted: hosts separated by commas" in str(caught.value)


def test_millraces_own_queues_are_not_for_callbacks() -> None:
    limits = LimitSettings(callback_queues="millrace,millrace.fake")
    for queue in ("millrace", "millrace.fake"):
        with pytest.raises(InvalidOption, match="none of Millrace's own"):
            CallbackTarget.checked(f"task:x@{queue}", limits)


PRIVATE = ["127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1",
           "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1",
           "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2001:db8::1",
           "fec0::1"]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_an_address_of_a_private_network_is_none_of_the_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.215.14", "2606:4700::1111", "::ffff:1.1.1.1"])
def test_others_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("secret", ["whsec_", "whsec_MfKQ", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_" + "!" * 40])
def test_a_secret_of_another_form_is_refused_and_not_shown(secret: str) -> None:
    with pytest.raises(SettingsError, match=r"callbacks\.secret=\*\*\*: accepted: whsec_ and 24") as caught:
        load_settings({"callbacks.secret": secret}, environ={})
    assert secret == "whsec_" or secret not in str(caught.value)


def test_a_secret_is_masked() -> None:
    rows = load_settings({"callbacks.secret": SECRET}, environ={}).rows()
    assert [row.value_text for row in rows if row.key == "callbacks.secret"] == ["***"]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


def _post(url: str, host: str, timeout_s: float = 30.0) -> None:
    target = CallbackTarget.checked(url, LimitSettings(callback_private_hosts=host))
    post(EVENT, target, secret=SECRET, timeout_s=timeout_s)


def test_openais_and_standardwebhooks_packages_accept_an_event(receiver: Receiver) -> None:
    _post(receiver.url, receiver.host)
    [(headers, body)] = receiver.received
    with OpenAI(api_key="none", webhook_secret=SECRET) as client:
        event = client.webhooks.unwrap(body, headers)
    assert type(event) is BatchCompletedWebhookEvent
    assert (event.id, event.data.id, event.created_at, event.object) == (EVENT.id, JOB, EVENT.created_at, "event")
    assert Webhook(SECRET).verify(body, headers)["data"] == {"id": JOB, "request_counts": dict(EVENT.counts)}
    assert (headers["host"], headers["content-type"]) == (receiver.host, "application/json")
    with pytest.raises(WebhookVerificationError):
        Webhook(SECRET).verify(body.replace(b"completed", b"cancelled"), headers)
    with pytest.raises(WebhookVerificationError):
        Webhook("whsec_" + "A" * 32).verify(body, headers)


@pytest.mark.parametrize("status", [199, 302, 400, 404, 410, 500, 503])
def test_a_status_but_200_to_299_is_a_failure(status: int) -> None:
    with receiving(status) as receiver, pytest.raises(DeliveryFailed, match="answer"):
        _post(receiver.url, receiver.host, timeout_s=30.0 if status > 199 else 2.0)
    assert len(receiver.received) == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_to_a_private_address_is_not_followed(receiver: Receiver, status: int) -> None:
    with receiving(status) as first:
        first.location = receiver.url
        with pytest.raises(DeliveryFailed, match=f"answered {status}: redirects are not followed"):
            _post(first.url, first.host)
    assert (len(first.received), receiver.received) == (1, [])


def test_a_public_name_of_a_private_address_is_not_connected_to(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = receiver.server_address[1]
    found: list[str] = []

    def resolved(host: str, asked: int, **_: object) -> list[tuple[object, ...]]:
        found.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    target = CallbackTarget.checked(f"https://hooks.example.com:{port}/", LimitSettings(callback_hosts=f"*.com:{port}"))
    with pytest.raises(DeliveryFailed, match="private network"):
        post(EVENT, target, secret=SECRET, timeout_s=30.0)
    assert (found, receiver.received) == (["hooks.example.com"], [])  # looked up once, and not connected to


@contextmanager
def _raw_receiver(*parts: bytes, ends: bool) -> Iterator[str]:
    """Answers one connection with these bytes, then closes it, or leaves it open until the end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)  # nobody may come
        closing = threading.Event()

        def answer() -> None:
            with suppress(OSError), server.accept()[0] as connection:
                connection.recv(65_536)
                for part in parts:
                    connection.sendall(part)
                if not ends:
                    closing.wait(60)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            closing.set()
            thread.join()


RAW_ANSWERS: dict[str, tuple[list[bytes], bool, str]] = {
    "hangs": ([], False, r"no answer within 0.3 s \(callbacks.timeout_s\)"),
    "hangs in its status": ([b"HTTP/1.1 2"], False, "no answer within"),
    "dies": ([], True, "closed without an answer|the connection failed"),
    "dies in its status": ([b"HTTP/1.1 20"], True, "breaks off|the connection failed"),
    "is no HTTP": ([b"x" * 20_000], True, "not HTTP|the connection failed"),
    "says to go on, then fails": ([b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 500 No\r\n\r\n"], True, "answered 500"),
}


@pytest.mark.parametrize("kind", RAW_ANSWERS)
def test_a_receiver_that_misbehaves_is_a_failure(kind: str) -> None:
    parts, ends, problem = RAW_ANSWERS[kind]
    with _raw_receiver(*parts, ends=ends) as host, pytest.raises(DeliveryFailed, match=problem):
        _post(f"http://{host}/", host, timeout_s=30.0 if ends else 0.3)


def test_a_receiver_that_has_more_to_say_first_has_taken_it() -> None:
    with _raw_receiver(b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n", ends=True) as host:
        _post(f"http://{host}/", host)


def test_nobody_listens_there_or_speaks_no_tls(receiver: Receiver) -> None:
    with pytest.raises(DeliveryFailed, match="TLS"):
        _post(receiver.url.replace("http:", "https:"), receiver.host)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        host = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(DeliveryFailed, match="the connection failed"):
            _post(f"http://{host}/", host)
