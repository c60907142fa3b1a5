"""What every route of a server works with, and how a route is made: who asks, and what an error is answered with."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Self

from redis.asyncio import Redis as AsyncRedis
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from settings import Settings
from worker.async_client import AsyncBatchClient
from worker.registry.connect import connect_async
from worker.registry.errors import JobNotFound
from worker.registry.exchange import perform_async
from worker.registry.files import FileStore
from worker.registry.jobs import JobQueries
from worker.registry.keys import Keys
from worker.schemas import JobStatus
from worker.serve.access import Gate, Slots
from worker.serve.answers import error_response, refusal_of
from worker.serve.errors import ServerFault
from worker.serve.metrics import RequestCounts
from worker.serve.uploads import Uploads

logger = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]
Handler = Callable[[Request, str], Awaitable[Response]]  # takes the tenant too


class ServeContext:
    """A server's connections, for the event loop that it runs in. All else is in Redis."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.keys = Keys()
        self.redis: AsyncRedis = connect_async(settings.redis)
        self.queries = JobQueries(self.keys)
        self.jobs = AsyncBatchClient(settings.redis, limits=settings.limits, tracing=settings.tracing)
        self.files = FileStore(self.keys, settings.redis, settings.limits, settings.serve)
        self.counts = RequestCounts()
        self.uploads = Uploads(self.redis, self.keys, self.files, settings, self.counts)
        self.downloads = Slots("downloads", settings.serve.max_downloads)
        self.gate = Gate(self.redis, self.keys, settings.serve.host)
        self.stopping = asyncio.Event()  # the server ends: what would go on for ever does, too

    async def job_of(self, tenant: str, job_id: str) -> JobStatus:
        """A job of this tenant. Raises JobNotFound for any other, in the words for one that there never was."""
        look = await perform_async(self.redis, self.queries.look(self.keys.check_job_id(job_id)))
        if look.status.tenant != tenant:  # compared before an overdue job is ended, which takes time and writes
            raise JobNotFound(job_id)
        return await self.jobs.status(job_id) if look.is_abandoned else look.status

    def route(self, path: str, handler: Handler, methods: Sequence[str]) -> Route:
        """The route of a handler, which is called with the tenant whose key the request has."""

        async def for_tenant(request: Request) -> Response:
            return await handler(request, await self.gate.tenant_of(request))

        return Route(path, self._counted(path, answered(for_tenant)), methods=list(methods))

    def _counted(self, path: str, endpoint: Endpoint) -> Endpoint:
        async def counting(request: Request) -> Response:
            response = await endpoint(request)
            self.counts.requests[request.method, path, str(response.status_code)] += 1
            return response

        return counting

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.jobs.close()
        await self.redis.aclose()


def answered(handler: Endpoint) -> Endpoint:
    """The handler with its errors as answers."""

    async def endpoint(request: Request) -> Response:
        try:
            return await handler(request)
        except Exception as error:  # a seam: a defect is an error object too, and is logged
            refusal = refusal_of(error)
            if refusal is None:
                logger.exception("a request could not be answered")
                refusal = ServerFault()
            return error_response(refusal)

    return endpoint
