"""Starts private Redis servers for tests: real redis-servers, never a mock.

Plain, with the users that `millrace acl` prints, stopped and started again on the same port, behind TLS (stunnel's, as
not every server has its own), behind a TCP proxy that misbehaves as networks do, set up badly for `millrace doctor`, or
with a reply that gets lost after the command was carried out.
"""

from __future__ import annotations

import os
import random
import resource
import select
import selectors
import signal
import socket
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
import trustme

from settings import RedisSettings
from tests.support.processes import redis_executable, server_version
from worker.acl import ADMIN, FLOWER, PRODUCER, SERVER, WORKER, acl_file
from worker.doctor.redis import redis_findings
from worker.doctor.redis_facts import RedisFacts, connect_once
from worker.doctor.report import Finding

START_TIMEOUT_S = 20.0

_PASSWORDS = {
    PRODUCER: "a-producer's p@ss/word",
    WORKER: "a-worker's p@ss/word #2",
    SERVER: "a-server's p@ss/word #5",
    FLOWER: "flower's p@ss/word #4",
    ADMIN: "an-admin's p@ss/word :3",
}

HOST = "127.0.0.1"

# Below the ports that Linux gives to outgoing connections: a client that tries again and again to reach a server that
# is down could be given that very port, be connected to itself, and keep the server from coming back.
SERVER_PORTS = range(20_000, 32_000)

PROXY_POLL_S = 0.1
CHUNK_BYTES = 65_536


def _command(options: Mapping[str, object], executable: str = "") -> list[str]:
    words = (word for name, value in options.items() for word in (f"--{name}", str(value)))
    return [executable or redis_executable(), *words, "--maxmemory-policy", "noeviction"]


@contextmanager
def private_redis(directory: Path, *, port: int) -> Iterator[str]:
    """Run a server on `port`, and `redis.sock` in `directory`; it keeps nothing on disk. Yields its URL."""
    options = {"port": port, "bind": "127.0.0.1", "dir": directory, "save": "", "appendonly": "no"}
    options["unixsocket"] = directory / "redis.sock"
    with (directory / "redis.log").open("wb") as log:
        process = subprocess.Popen(_command(options), stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_until_it_answers(port, process)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait(timeout=START_TIMEOUT_S)


def wait_until_it_answers(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until the server on `port` has loaded its data; raises redis.RedisError if it ends or takes too long."""
    with redis.Redis(port=port) as client:
        wait_until_answered(client, process)


def wait_until_answered(client: redis.Redis, process: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            client.ping()
        except redis.RedisError:
            if process.poll() is not None or time.monotonic() > until_s:
                raise
            time.sleep(0.05)
        else:
            return


def free_port() -> int:
    """A port of this machine that was free a moment ago; no outgoing connection is given it.

    Processes of pytest-xdist take turns at the ports: none gets one that another is about to listen on.
    """
    first, step = os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:], os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
    for port in random.SystemRandom().sample(SERVER_PORTS[int(first) :: int(step)], 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise RuntimeError(f"a hundred ports of {SERVER_PORTS} are taken")


class RestartableRedis:
    """A server that can be started again. If `is_durable` it keeps its data in the append-only file of compose.yaml."""

    def __init__(
        self, directory: Path, *, is_durable: bool, executable: str = "", options: Mapping[str, object] | None = None
    ) -> None:
        self._executable = executable
        self._options = options or {}
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.directory = directory
        self._is_durable = is_durable
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait until it has read its file and answers."""
        options = {"port": self.port, "bind": "127.0.0.1", "dir": self.directory, "save": ""}
        # Flushed before each answer: everysec lost 17 of 20 answered writes, measured, to a kill beside a busy disk.
        options |= {"appendonly": "yes" if self._is_durable else "no", "appendfsync": "always"}
        options["auto-aof-rewrite-percentage"] = 0  # else a place in the file, see faults.FileHistory, would move
        command = _command({**options, **self._options}, self._executable)
        # Inherited, so a file that may not grow is an error of write() and not the end. Python ignores it from its
        # start on, but LLVM catches it once Triton has compiled, which is not inherited.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with (self.directory / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, restore_signals=False)
        wait_until_it_answers(self.port, self._process)

    def stop(self) -> None:
        """End it as an administrator would: it writes its file first."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(START_TIMEOUT_S)

    def kill(self) -> None:
        """End it as the kernel would when memory runs out."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(START_TIMEOUT_S)

    @contextmanager
    def no_larger_files(self) -> Iterator[None]:
        """Let its files grow no further, as on a full disk: with `appendfsync always` a server would end itself."""
        assert self._process is not None, "the server does not run"
        with redis.Redis.from_url(self.url) as client:
            client.config_set("appendfsync", "everysec")
        present = max(path.stat().st_size for path in self.directory.glob("*.aof"))
        before = resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (present, before[1]))
        try:
            yield
        finally:
            resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, before)


@contextmanager
def restartable_redis(directory: Path, *, is_durable: bool) -> Iterator[RestartableRedis]:
    """A running server that ends with the block."""
    server = RestartableRedis(directory, is_durable=is_durable)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@dataclass(frozen=True)
class AclRedis:
    """A server, and a client that may do everything."""

    port: int
    admin: redis.Redis
    version: tuple[int, int]

    @property
    def has_functions(self) -> bool:
        return self.version >= (7, 0)

    @property
    def producer_url(self) -> str:
        return self.url(PRODUCER.name, "a-producer's%20p%40ss%2Fword")

    @property
    def worker_url(self) -> str:
        return self.url(WORKER.name, "a-worker's%20p%40ss%2Fword%20%232")

    @property
    def flower_url(self) -> str:
        return self.url(FLOWER.name, "flower's%20p%40ss%2Fword%20%234")

    def url(self, user: str, quoted_password: str) -> str:
        return f"redis://{user}:{quoted_password}@127.0.0.1:{self.port}/0"

    def denials(self) -> list[str]:
        """Calls that users were refused since the log was last cleared."""
        return [
            f"{entry['username']} may not {entry['context']} {entry['reason']} {entry['object']} (x{entry['count']})"
            for entry in self.admin.acl_log()
        ]


@contextmanager
def acl_redis(directory: Path, *, port: int, executable: str = "") -> Iterator[AclRedis]:
    """Run a server on `port` with every user of ours, and no default user; `done` is a queue for callbacks."""
    file = directory / "users.acl"
    version = server_version(executable or redis_executable())
    file.write_text(acl_file(_PASSWORDS, version, ["done"]))
    options = {"port": port, "bind": "127.0.0.1", "dir": directory, "save": "", "aclfile": file, "appendonly": "yes"}
    if version >= (7, 0):  # off by default since then, which would refuse the command, not the user
        options |= {"enable-module-command": "local", "enable-debug-command": "local"}
    with (directory / "redis.log").open("wb") as log:
        process = subprocess.Popen(_command(options, executable), stdout=log, stderr=subprocess.STDOUT)
    admin = redis.Redis(port=port, username=ADMIN.name, password=_PASSWORDS[ADMIN], decode_responses=True)
    try:
        wait_until_answered(admin, process)
        yield AclRedis(port, admin, version)
    finally:
        admin.close()
        process.terminate()
        process.wait(timeout=START_TIMEOUT_S)


@contextmanager
def tls_front(backend_port: int, ca_file: Path) -> Iterator[int]:
    """Serve `backend_port` encrypted on the port that is yielded; writes who signed its certificate to `ca_file`."""
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(ca_file))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert(HOST, "localhost").configure_cert(context)
    stop, stopped = socket.socketpair()  # `stopped` becomes readable when `stop` is closed

    def serve(plain: socket.socket) -> None:
        _serve_connection(plain, context, backend_port, stopped)

    with stop, stopped, closing(socket.create_server((HOST, 0))) as listener:
        accepting = threading.Thread(target=_accept_connections, args=(listener, serve), daemon=True)
        accepting.start()
        try:
            yield listener.getsockname()[1]
        finally:
            stop.close()
            listener.shutdown(socket.SHUT_RDWR)  # closing alone does not wake a thread in accept
            accepting.join()


def _accept_connections(listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
    """Serve each connection on a thread of its own; all have ended when this returns."""
    connections: list[threading.Thread] = []
    with suppress(OSError):  # the listener was shut down
        while True:
            plain, _ = listener.accept()
            connections.append(threading.Thread(target=serve, args=(plain,), name="tls-connection", daemon=True))
            connections[-1].start()
    for connection in connections:
        connection.join()


def _serve_connection(plain: socket.socket, context: ssl.SSLContext, backend_port: int, stopped: socket.socket) -> None:
    with plain, suppress(OSError):
        plain.settimeout(10.0)
        with (
            context.wrap_socket(plain, server_side=True) as client,
            socket.create_connection((HOST, backend_port)) as backend,
        ):
            _copy_both_ways(client, backend, stopped)


def _copy_both_ways(client: ssl.SSLSocket, backend: socket.socket, stopped: socket.socket) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(stopped, selectors.EVENT_READ)
        selector.register(client, selectors.EVENT_READ, backend)
        selector.register(backend, selectors.EVENT_READ, client)
        while True:
            for key, _ in selector.select():
                if key.fileobj is stopped:
                    return
                source = client if key.data is backend else backend
                data = source.recv(65536)
                # A selector does not see what TLS has decrypted already.
                while source is client and client.pending():
                    data += client.recv(65536)
                if not data:
                    return
                key.data.sendall(data)


class TcpProxy:
    """Passes connections on to a port of this machine, from a port of its own."""

    def __init__(self, target_port: int) -> None:
        self.latency_s = 0.0  # of each chunk, in each direction
        self.reset_probability = 0.0  # of each chunk
        self.target_port = target_port  # of the next connections
        self._closing = threading.Event()
        self._connected = threading.Event()  # cleared: a partition
        self._connected.set()
        self._dead: set[socket.socket] = set()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(PROXY_POLL_S)
        self._random = random.Random(0)  # its own: hypothesis objects if another thread draws from `random`
        self._pumps: list[threading.Thread] = []
        self.port = int(self._listener.getsockname()[1])
        self._accepting = threading.Thread(target=self._accept, name="proxy", daemon=True)
        self._accepting.start()

    def kill_half(self) -> int:
        """Let nothing pass over the present connections and tell neither side; how many there were.

        New connections work. So does a router behave that forgot its state.
        """
        self._dead |= self._open
        return len(self._dead) // 2

    @contextmanager
    def partition(self) -> Iterator[None]:
        """Let nothing pass in either direction. What was sent arrives afterwards, if its connection still stands."""
        self._connected.clear()
        try:
            yield
        finally:
            self._connected.set()

    def close(self) -> None:
        """End the proxy and every connection; its threads have ended when this returns."""
        self._closing.set()
        self._connected.set()
        self._listener.close()
        self._accepting.join()
        for end in list(self._open):
            with suppress(OSError):  # its pump was quicker
                end.shutdown(socket.SHUT_RDWR)  # wakes a pump whose send nobody takes
        for pump in self._pumps:
            pump.join()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.target_port))
            except OSError:
                client.close()
                continue
            self._open |= {client, server}
            for source, target in ((client, server), (server, client)):
                self._pumps.append(
                    threading.Thread(target=self._pump, args=(source, target), name="proxy-pump", daemon=True)
                )
                self._pumps[-1].start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while not self._closing.is_set():
                # Not by a timeout of the socket: the pump of the other direction sends on it meanwhile.
                if not select.select([source], [], [], PROXY_POLL_S)[0]:
                    continue
                data = source.recv(CHUNK_BYTES)
                if not data:
                    break
                self._pass_on(data, source, target)
        except (OSError, ValueError):
            pass  # the other direction was closed
        finally:
            self._open -= {source, target}
            for end in (source, target):
                end.close()

    def _pass_on(self, data: bytes, source: socket.socket, target: socket.socket) -> None:
        self._closing.wait(self.latency_s)
        self._connected.wait()
        if source in self._dead:
            return
        if self._random.random() < self.reset_probability:
            for end in (source, target):  # no linger: closing sends RST
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raise ConnectionResetError
        target.sendall(data)


@contextmanager
def tcp_proxy(target_port: int) -> Iterator[TcpProxy]:
    """A proxy for the length of the block."""
    proxy = TcpProxy(target_port)
    try:
        yield proxy
    finally:
        proxy.close()


def lose_next_script_reply(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let `client` lose the reply to its next script, so that it sends the call again. The list gets what was lost."""
    parse_response: Callable[..., Any] = client.parse_response
    lost: list[str] = []

    def parse_and_lose(connection: Any, command_name: str, **options: Any) -> Any:
        reply = parse_response(connection, command_name, **options)
        if command_name in ("EVALSHA", "FCALL") and not lost:
            lost.append(command_name)
            raise redis.ConnectionError("the reply got lost")
        return reply

    monkeypatch.setattr(client, "parse_response", parse_and_lose)
    return lost


def redis_settings(url: str, **options: object) -> RedisSettings:
    return RedisSettings.model_validate({"url": url, **options}, strict=False)


def found_at(url: str, *, for_worker: bool = False, **options: object) -> dict[str, Finding]:
    """What the doctor finds, by check; each check must have one finding."""
    findings = list(redis_findings(redis_settings(url, **options), url, for_worker=for_worker))
    by_check = {finding.check: finding for finding in findings}
    assert len(by_check) == len(findings), findings
    return by_check


def facts_at(url: str) -> RedisFacts:
    with connect_once(redis_settings(url)) as client:
        return RedisFacts.ask(client, redis_settings(url))


@contextmanager
def configured(url: str, **values: str) -> Iterator[redis.Redis]:
    """Set these settings (`_` for `-`) of the server at `url` for the length of the block."""
    with redis.Redis.from_url(url, decode_responses=True) as client:
        names = {name.replace("_", "-"): value for name, value in values.items()}
        before = {name: client.config_get(name)[name] for name in names}
        try:
            for name, value in names.items():
                client.config_set(name, value)
            yield client
        finally:
            for name, value in reversed(before.items()):
                client.config_set(name, value)
