"""Runs `millrace serve` in a thread, and asks it as OpenAI's client and as a bare one do; receives its callbacks."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx2
from openai import OpenAI
from openai.types import Batch
from pydantic import SecretStr

from settings import LimitSettings, MetricsSettings, RedisSettings, ServeSettings, Settings
from settings.callbacks import CallbackSettings
from tests.support.processes import wait_until
from tests.support.redis_servers import free_port
from tests.support.request_lines import CHAT, batch_line
from worker.registry.api_keys import ApiKeys
from worker.registry.connect import connect
from worker.registry.keys import Keys
from worker.serve.app import make_server

ENDED = ("completed", "failed", "expired", "cancelled")


@dataclass(frozen=True)
class HttpServer:
    """A server that runs, and a client without a key."""

    url: str
    http: httpx2.Client

    def openai(self, key: str = "none") -> OpenAI:
        """OpenAI's client, of which nothing is set but these two."""
        return OpenAI(base_url=f"{self.url}/v1", api_key=key)

    def upload(self, data: bytes, key: str = "", **fields: str) -> httpx2.Response:
        return self.http.post(
            "/v1/files", files={"file": ("lines.jsonl", data)}, data={"purpose": "batch", **fields}, headers=bearer(key)
        )

    def upload_id(self, data: bytes, key: str = "") -> str:
        answer = self.upload(data, key)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    def create(self, file_id: str, key: str = "", **fields: Any) -> httpx2.Response:
        body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h", **fields}
        return self.http.post("/v1/batches", json=body, headers=bearer(key))

    def create_id(self, file_id: str, key: str = "") -> str:
        answer = self.create(file_id, key)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


@contextmanager
def serving(
    redis_url: str,
    *,
    limits: LimitSettings | None = None,
    redis: RedisSettings | None = None,
    metrics: MetricsSettings | None = None,
    callbacks: CallbackSettings | None = None,
    **options: Any,
) -> Iterator[HttpServer]:
    """A server on a free port of this machine; options are those of ServeSettings."""
    port = free_port()
    settings = Settings(
        redis=redis or RedisSettings(url=SecretStr(redis_url)),
        limits=limits or LimitSettings(),
        metrics=metrics or MetricsSettings(),
        callbacks=callbacks or CallbackSettings(),
        serve=ServeSettings(port=port, **options),
    )
    server = make_server(settings)
    thread = threading.Thread(target=server.run, name="millrace-serve")
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        url = f"http://127.0.0.1:{port}"
        with httpx2.Client(base_url=url, timeout=60, trust_env=False) as http:
            yield HttpServer(url, http)
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


def is_open(port: int) -> bool:
    """Whether something listens on this port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def chat_lines(*names: str, model: str = "fake") -> bytes:
    """A file of chat requests with these custom_ids."""
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    return b"".join(batch_line(CHAT, body, custom_id=name) + b"\n" for name in names)


def new_key(redis_url: str, tenant: str | None) -> str:
    """A key of this tenant; None: of metrics."""
    with connect(RedisSettings(url=SecretStr(redis_url))) as client:
        return ApiKeys(client, Keys()).create(tenant, "a test's")[1]


def ended_batch(client: OpenAI, batch_id: str, is_so: Callable[[Batch], object] | None = None) -> Batch:
    """The batch once it has ended, or `is_so`."""
    found: list[Batch] = []

    def look() -> object:
        found.append(client.batches.retrieve(batch_id))
        return is_so(found[-1]) if is_so else found[-1].status in ENDED

    wait_until(look, timeout_s=60)
    return found[-1]


def records(content: bytes) -> Sequence[dict[str, Any]]:
    """The records of a downloaded file."""
    return [json.loads(line) for line in content.splitlines()]


class Receiver(ThreadingHTTPServer):
    """Takes callbacks. `answers`: the next ones, a status, or `hang` until the receiver closes; then always 200."""

    daemon_threads = True

    def __init__(self, answers: Sequence[int | str] = ()) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = list(answers)
        self.location = ""  # of redirects
        self.together: threading.Barrier | None = None  # answers once so many have come, again and again
        self.received: list[tuple[dict[str, str], bytes]] = []
        self.closing = threading.Event()

    @property
    def host(self) -> str:
        """Its address and port."""
        return f"127.0.0.1:{self.server_address[1]}"

    @property
    def url(self) -> str:
        return f"http://{self.host}/done?who=us"

    @property
    def ids(self) -> list[str]:
        """Of what came, in its order."""
        return [headers["webhook-id"] for headers, _ in self.received]


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer = self.server.answers.pop(0) if self.server.answers else 200
        self.server.received.append(({name.lower(): value for name, value in self.headers.items()}, body))
        if answer == "hang":
            self.server.closing.wait(60)
            return
        if self.server.together is not None:
            self.server.together.wait(60)
        self.send_response(int(answer))
        if self.server.location:
            self.send_header("Location", self.server.location)
        self.end_headers()

    def log_message(self, *_arguments: object) -> None:
        """Nothing."""


@contextmanager
def receiving(*answers: int | str) -> Iterator[Receiver]:
    """A receiver of callbacks on this machine."""
    with Receiver(answers) as receiver:
        thread = threading.Thread(target=receiver.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield receiver
        finally:
            receiver.closing.set()
            receiver.shutdown()
            thread.join()
