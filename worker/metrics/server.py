"""Serves a worker's metrics and health over HTTP."""

from __future__ import annotations

import errno
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import TCPServer, ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app

from settings import SettingsError

REQUEST_TIMEOUT_S = 10.0  # for a client that connects and says nothing, or does not read
CLOSE_POLL_S = 0.1  # between looks whether to end

logger = logging.getLogger(__name__)


class MetricsServer:
    """Serves /metrics and /healthz on threads of its own, from `start` until `close`."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry, reasons: Callable[[], list[str]]) -> None:
        """`reasons`: why the worker takes no work, empty if it does."""
        self._address = host, port
        self._app = _app(registry, reasons)
        self._server: _Server | None = None

    def start(self) -> None:
        """Begin to answer. Raises SettingsError if the port cannot be had."""
        self._server = _bind(*self._address)
        self._server.set_app(self._app)
        threading.Thread(
            target=self._server.serve_forever, args=(CLOSE_POLL_S,), name="metrics-server", daemon=True
        ).start()

    def close(self) -> None:
        """Stop answering and free the port, if it was started."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_TIMEOUT_S

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a line for each scrape would drown the log."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Bind without asking for the host's full name, as HTTPServer does: that may wait for a name server."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]  # bytes: of Unix sockets
        self.setup_environ()

    def handle_error(self, request: object, client_address: object) -> None:
        """Log a client that was silent or went away, instead of a bare traceback."""
        logger.warning("a request for metrics or health was not answered", exc_info=True)


class _ServerOfIPv6(_Server):
    address_family = socket.AF_INET6


def _bind(host: str, port: int) -> _Server:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        server = _ServerOfIPv6 if family is socket.AF_INET6 else _Server
        return server((str(address[0]), port), _Handler)
    except socket.gaierror as error:
        raise _not_an_address(host) from error
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise _not_an_address(host) from error
        problem = "another program, perhaps another worker, has this port" if error.errno == errno.EADDRINUSE else ""
        raise SettingsError(
            "metrics.port", str(port), problem or str(error.strerror), accepted=f"a free port of {host}, or none"
        ) from error


def _not_an_address(host: str) -> SettingsError:
    return SettingsError("metrics.host", host, "", accepted="an address or name of this machine")


def _app(registry: CollectorRegistry, reasons: Callable[[], list[str]]) -> WSGIApplication:
    metrics = make_wsgi_app(registry)

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            figures: Iterable[bytes] = metrics(environ, start_response)
            return figures
        if path == "/healthz":
            found = reasons()
            start_response("503 Service Unavailable" if found else "200 OK", [("Content-Type", "application/json")])
            return [json.dumps({"status": "unavailable" if found else "ok", "reasons": found}).encode()]
        start_response("404 Not Found", [("Content-Type", "text/plain")])
        return [b"/metrics, /healthz\n"]

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        try:
            return answer(environ, start_response)
        except Exception:  # a seam: figures that could not be made; wsgiref would print a bare traceback
            logger.exception("%s could not be answered", environ["PATH_INFO"])
            start_response("500 Internal Server Error", [("Content-Type", "text/plain")])
            return [b"see the worker's log\n"]

    return app
