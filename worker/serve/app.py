"""Puts the server together: its routes, what they work with, and the HTTP server that runs them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import h11
import redis
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from settings import Settings, SettingsError
from worker.callbacks.sender import sending_callbacks
from worker.registry.api_keys import look
from worker.registry.connect import connect
from worker.registry.exchange import Exchange, RedisReply, perform, perform_async
from worker.registry.keys import Keys
from worker.registry.models import ServedModels
from worker.serve.access import is_this_machine
from worker.serve.answers import error_response, on_http_error, read_query
from worker.serve.batches import BatchRoutes
from worker.serve.context import ServeContext, answered
from worker.serve.errors import ApiError
from worker.serve.files import FileRoutes
from worker.serve.html import Pages, file_routes
from worker.serve.metrics import ServerMetrics
from worker.serve.openapi import document_routes
from worker.serve.page import PageRoutes

MAX_HEADER_BYTES = 32 * 1024
STOP_TIMEOUT_S = 30  # for answers that are on their way
REDIS_TIMEOUT_S = 3.0  # after which /healthz says that Redis does not answer


class ModelRoutes:
    """The models that workers serve now. What is not known of one, when it was made, is 0."""

    def __init__(self, context: ServeContext) -> None:
        self._context = context

    def routes(self) -> Sequence[Route]:
        """Every route."""
        route = self._context.route
        return [route("/v1/models", self.list, ["GET"]), route("/v1/models/{model:path}", self.retrieve, ["GET"])]

    async def list(self, request: Request, _tenant: str) -> Response:
        """All of them, under each of their names."""
        read_query(request, {})
        return JSONResponse({"object": "list", "data": list((await self._models()).values())})

    async def retrieve(self, request: Request, _tenant: str) -> Response:
        """One of them."""
        read_query(request, {})
        name = request.path_params["model"]
        models = await self._models()
        if name not in models:
            raise ApiError(
                f"no worker serves the model {name[:80]!r}", status=404, param="model", code="model_not_found"
            )
        return JSONResponse(models[name])

    async def _models(self) -> Mapping[str, dict[str, object]]:
        served = await perform_async(self._context.redis, _served(self._context.keys))
        contexts = served.contexts
        return {
            name: {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "millrace",
                # Of its smallest worker; vLLM's name for it.
                "max_model_len": contexts[served.resolve(name) or name][0],
            }
            for name in served.names
        }


def _served(keys: Keys) -> Exchange[ServedModels]:
    return ServedModels.of_answers((yield ServedModels.questions(keys)))


def make_app(settings: Settings) -> Starlette:
    """The application. It connects to Redis when it starts."""
    context = ServeContext(settings)

    async def healthz(_request: Request) -> Response:
        try:
            async with asyncio.timeout(REDIS_TIMEOUT_S):
                await perform_async(context.redis, _ping())
        except (redis.RedisError, OSError, TimeoutError):
            return JSONResponse({"status": "unavailable", "reasons": ["Redis does not answer"]}, 503)
        return JSONResponse({"status": "ok", "reasons": []})

    metrics = ServerMetrics(context.redis, settings.redis, context.counts, settings.metrics.queue_interval_s)

    async def figures(request: Request) -> Response:
        await context.gate.check_may_read_metrics(request)
        return await metrics.response(request)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with context:
            with sending_callbacks(settings):
                yield

    routes = [route for kind in (FileRoutes, BatchRoutes, ModelRoutes) for route in kind(context).routes()]
    own = [Route("/healthz", answered(healthz)), Route("/metrics", answered(figures))]
    app = Starlette(
        routes=[*routes, *own, *_page_routes(context)],
        middleware=[Middleware(HeaderGuard)],
        exception_handlers={HTTPException: on_http_error},
        lifespan=lifespan,
    )
    # A redirect would come before any key, and to whatever host the request names.
    app.router.redirect_slashes = False
    app.state.stopping = context.stopping
    return app


def _page_routes(context: ServeContext) -> Sequence[Route]:
    pages = Pages()
    return [*PageRoutes(context, pages).routes(), *document_routes(pages), *file_routes()]


class HeaderGuard:
    """Refuses what uvicorn lets through: long headers that come all at once, and a body of two lengths.

    Of the latter a proxy before this server may have taken the other, and its rest for the next request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or let the application."""
        app = self._app
        if scope["type"] == "http":
            names = [name for name, _ in scope["headers"]]
            if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
                app = _closing(ApiError(f"the headers have more than {MAX_HEADER_BYTES} bytes", status=431))
            elif b"transfer-encoding" in names and b"content-length" in names:
                app = _closing(ApiError("the request has Content-Length and Transfer-Encoding; accepted: one"))
        await app(scope, receive, send)


def _closing(error: ApiError) -> ASGIApp:
    response = error_response(error)
    response.headers["Connection"] = "close"
    return response


def _ping() -> Exchange[RedisReply]:
    [answer] = yield [("PING",)]
    return answer


def check_address(settings: Settings) -> None:
    """Raise SettingsError for an address that others reach while there is no key; redis.RedisError."""
    host = settings.serve.host
    if is_this_machine(host):
        return
    with connect(settings.redis) as client:
        _, are_keys = perform(client, look(Keys(), None))
    if not are_keys:
        raise SettingsError(
            "serve.host",
            host,
            "others reach it, and there is no key: whoever comes would see every job",
            accepted="127.0.0.1, or a key first (`millrace keys create --tenant NAME`)",
        )


class ImpatientProtocol(H11Protocol):
    """uvicorn's HTTP, which closes a connection whose headers do not come in time, or whose client reads nothing.

    uvicorn waits for the first request, for the rest of any headers, and for a client to take an answer, for ever. The
    time is that of headers as a whole; it also bounds how long the rest of a body that was refused is read, and how
    long an answer waits while none of it is taken.
    """

    timeout_s = 30.0
    _late: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Wait for headers."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take what came; while no request is at work, the time runs on."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """The next request of the connection has its own time, from its first byte on."""
        self._stop_watching()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_watching()
        self._stop_watching_writes()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.conn.our_state in (h11.SEND_RESPONSE, h11.SEND_BODY):  # a request is at work
            self._stop_watching()
        elif self._late is None and not self.transport.is_closing():
            self._late = self.loop.call_later(self.timeout_s, self._give_up)

    def _stop_watching(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def pause_writing(self) -> None:
        """The client is slower than the server: from here on it has to take something from time to time."""
        super().pause_writing()
        self._watch_writes()

    def resume_writing(self) -> None:
        """It has taken nearly all."""
        self._stop_watching_writes()
        super().resume_writing()

    def _watch_writes(self) -> None:
        num_bytes = self.transport.get_write_buffer_size()
        self._stuck = self.loop.call_later(self.timeout_s, self._check_writes, num_bytes)

    def _check_writes(self, num_bytes: int) -> None:
        if self.transport.get_write_buffer_size() < num_bytes:  # nothing is added while writing is paused
            self._watch_writes()
        else:
            self._give_up()

    def _stop_watching_writes(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def _give_up(self) -> None:
        self.transport.abort()


class StoppingServer(uvicorn.Server):
    """uvicorn's server, which ends live pages before it waits for answers that are on their way."""

    def __init__(self, config: uvicorn.Config, stopping: asyncio.Event) -> None:
        super().__init__(config)
        self._stopping = stopping

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop."""
        self._stopping.set()
        await super().shutdown(sockets)


def make_server(settings: Settings) -> uvicorn.Server:
    """The server, which `run` lets serve until SIGINT or SIGTERM."""
    serve, app = settings.serve, make_app(settings)
    protocol = type("Protocol", (ImpatientProtocol,), {"timeout_s": serve.read_timeout_s})
    return StoppingServer(
        uvicorn.Config(
            app,
            host=serve.host,
            port=serve.port,
            http=protocol,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=serve.max_connections,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_graceful_shutdown=STOP_TIMEOUT_S,
        ),
        app.state.stopping,
    )
