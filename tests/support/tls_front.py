"""TLS in front of a plain Redis, as stunnel does it: not every redis-server is built with TLS."""

from __future__ import annotations

import selectors
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import trustme

HOST = "127.0.0.1"


@contextmanager
def tls_front(backend_port: int, ca_file: Path) -> Iterator[int]:
    """Serve `backend_port` encrypted, on the port that is yielded; who signed its certificate is put in `ca_file`."""
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(ca_file))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert(HOST, "localhost").configure_cert(context)
    with closing(socket.create_server((HOST, 0))) as listener:
        threading.Thread(target=_accept, args=(listener, context, backend_port), daemon=True).start()
        yield listener.getsockname()[1]


def _accept(listener: socket.socket, context: ssl.SSLContext, backend_port: int) -> None:
    with suppress(OSError):  # the listener was closed
        while True:
            plain, _ = listener.accept()
            threading.Thread(target=_serve, args=(plain, context, backend_port), daemon=True).start()


def _serve(plain: socket.socket, context: ssl.SSLContext, backend_port: int) -> None:
    with plain, suppress(OSError):
        plain.settimeout(10.0)
        with (
            context.wrap_socket(plain, server_side=True) as client,
            socket.create_connection((HOST, backend_port)) as backend,
        ):
            _copy_both_ways(client, backend)


def _copy_both_ways(client: ssl.SSLSocket, backend: socket.socket) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(client, selectors.EVENT_READ, backend)
        selector.register(backend, selectors.EVENT_READ, client)
        while True:
            for key, _ in selector.select():
                source = client if key.data is backend else backend
                data = source.recv(65536)
                # What TLS has decrypted already, no selector would tell of.
                while source is client and client.pending():
                    data += client.recv(65536)
                if not data:
                    return
                key.data.sendall(data)
