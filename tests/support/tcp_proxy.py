"""A TCP proxy that misbehaves as networks do."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

POLL_S = 0.1
CHUNK_BYTES = 65_536


class TcpProxy:
    """Passes connections on to a port of this machine, from a port of its own."""

    def __init__(self, target_port: int) -> None:
        self.latency_s = 0.0  # of each chunk, in each direction
        self.reset_probability = 0.0  # of each chunk
        self._target_port = target_port
        self._closing = threading.Event()
        self._connected = threading.Event()  # cleared: a partition
        self._connected.set()
        self._dead: set[socket.socket] = set()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(POLL_S)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def kill_half(self) -> int:
        """From now on nothing passes over the present connections, and neither side is told; how many there were.

        New ones work. It is what a router does that forgot its state.
        """
        self._dead |= self._open
        return len(self._dead) // 2

    @contextmanager
    def partition(self) -> Iterator[None]:
        """Nothing passes in either direction. What was sent arrives afterwards, where its connection still is."""
        self._connected.clear()
        try:
            yield
        finally:
            self._connected.set()

    def close(self) -> None:
        """End it and every connection."""
        self._closing.set()
        self._connected.set()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target_port))
            except OSError:
                client.close()
                continue
            self._open |= {client, server}
            for source, target in ((client, server), (server, client)):
                source.settimeout(POLL_S)
                threading.Thread(target=self._pump, args=(source, target), name="proxy-pump", daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while not self._closing.is_set():
                try:
                    data = source.recv(CHUNK_BYTES)
                except TimeoutError:
                    continue
                if not data:
                    break
                self._pass_on(data, source, target)
        except OSError:
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
        if random.random() < self.reset_probability:
            for end in (source, target):  # no linger: closing sends RST
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raise ConnectionResetError
        target.settimeout(None)
        target.sendall(data)
        target.settimeout(POLL_S)


@contextmanager
def tcp_proxy(target_port: int) -> Iterator[TcpProxy]:
    """A proxy for the length of the block."""
    proxy = TcpProxy(target_port)
    try:
        yield proxy
    finally:
        proxy.close()
