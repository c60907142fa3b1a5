"""Answers `/v1/batches`: jobs, made of uploaded files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from worker.lines.request_line import Endpoint
from worker.registry.errors import FileUnknown, JobNotFound
from worker.registry.exchange import perform_async
from worker.schemas import JobFilter, JobState, JobStatus, SubmitArguments, batch_object
from worker.serve.answers import read_body, read_query, whole_number
from worker.serve.context import ServeContext
from worker.serve.errors import ApiError
from worker.serve.files import page_of
from worker.serve.uploads import LEAST_TTL_S, MOST_TTL_S, idempotency_key

MAX_LISTED, LISTED = 100, 20  # as OpenAI has it

_WINDOW = re.compile(r"([1-9][0-9]{0,7})([smhd])")
_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
# Keys of metadata that are options of ours: OpenAI's clients can send no others.
_OPTIONS = "millrace."


class OutputExpiry(BaseModel):
    """OpenAI's `output_expires_after`: how long the results are kept after the job's end."""

    model_config = ConfigDict(extra="forbid", strict=True)

    anchor: Literal["created_at"]  # of the output, which is there when the job has ended
    seconds: int = Field(ge=LEAST_TTL_S, le=MOST_TTL_S)


class NewBatch(BaseModel):
    """The body of a request for a batch."""

    model_config = ConfigDict(extra="forbid", strict=True)

    input_file_id: str
    endpoint: Literal[tuple(Endpoint)]  # type: ignore[valid-type]  # its values, which JSON has as text
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: OutputExpiry | None = None


class BatchRoutes:
    """The routes of batches."""

    def __init__(self, context: ServeContext) -> None:
        self._context = context

    def routes(self) -> Sequence[Route]:
        """Every route."""
        route = self._context.route
        return [
            route("/v1/batches", self.create, ["POST"]),
            route("/v1/batches", self.list, ["GET"]),
            route("/v1/batches/{job_id}", self.retrieve, ["GET"]),
            route("/v1/batches/{job_id}", self.delete, ["DELETE"]),
            route("/v1/batches/{job_id}/cancel", self.cancel, ["POST"]),
        ]

    async def create(self, request: Request, tenant: str) -> Response:
        """Submit an uploaded file as a job."""
        read_query(request, {})
        key = idempotency_key(request)
        new = await read_body(request, NewBatch, self._context.settings.serve.read_timeout_s)
        options = _options(new, tenant, key)
        try:
            file = await perform_async(self._context.redis, self._context.files.find(tenant, new.input_file_id))
            job_id = await self._context.jobs.submit(file, **options)
        except FileUnknown as error:
            known = None if key is None else await self._job_under(tenant, key)
            if known is None or (known.input_file_id, known.endpoint) != (new.input_file_id, new.endpoint):
                raise ApiError(str(error), param="input_file_id", code="invalid_value") from error
            return JSONResponse(batch_object(known))  # a second try, after the file's time
        return JSONResponse(batch_object(await self._context.job_of(tenant, job_id)))

    async def _job_under(self, tenant: str, key: str) -> JobStatus | None:
        """The job that was made under an idempotency key, if it is not forgotten."""
        job_id = await perform_async(self._context.redis, self._context.queries.known(tenant, key))
        try:
            return None if job_id is None else await self._context.job_of(tenant, job_id)
        except JobNotFound:
            return None

    async def list(self, request: Request, tenant: str) -> Response:
        """The tenant's batches, the newest first, a page of them."""
        query = read_query(request, {"after": "", "limit": str(LISTED)})
        limit = whole_number("limit", query["limit"], 1, MAX_LISTED)
        after = query["after"] or None
        if after is not None:
            await self._context.job_of(tenant, after)
        found = await self._context.jobs.jobs(limit + 1, JobFilter(tenant=tenant), after)
        return JSONResponse(page_of([batch_object(job) for job in found[:limit]], has_more=len(found) > limit))

    async def retrieve(self, request: Request, tenant: str) -> Response:
        """A batch as it stands."""
        read_query(request, {})
        return JSONResponse(batch_object(await self._context.job_of(tenant, request.path_params["job_id"])))

    async def cancel(self, request: Request, tenant: str) -> Response:
        """Cancel a batch. One that was cancelled before is answered as it is; another that has ended is a conflict."""
        read_query(request, {})
        job = await self._context.job_of(tenant, request.path_params["job_id"])
        if job.status.is_terminal and job.status is not JobState.CANCELLED:
            raise ApiError(f"the batch is {job.status}; accepted: one that has not ended", status=409, code="conflict")
        return JSONResponse(batch_object(await self._context.jobs.cancel(job.id)))

    async def delete(self, request: Request, tenant: str) -> Response:
        """Forget a batch that has ended, with its output; beyond OpenAI's API."""
        read_query(request, {})
        job = await self._context.job_of(tenant, request.path_params["job_id"])
        await self._context.jobs.delete(job.id)
        return JSONResponse({"id": job.id, "object": "batch", "deleted": True})


def _options(new: NewBatch, tenant: str, key: str | None) -> SubmitArguments:
    metadata = new.metadata or {}
    options: SubmitArguments = {
        "tenant": tenant,
        "endpoint": new.endpoint,
        "deadline_s": _window_s(new.completion_window),
        "metadata": metadata,
        "idempotency_key": key,
        "input_file_id": new.input_file_id,
        "strict": True,
    }
    if new.output_expires_after is not None:
        options["result_ttl_s"] = new.output_expires_after.seconds
    return {**options, **_options_in(metadata)}


def _options_in(metadata: Mapping[str, str]) -> SubmitArguments:
    """Options of ours among the metadata: millrace.priority, millrace.strict, millrace.model, millrace.on_done."""
    found: SubmitArguments = {}
    for name, value in metadata.items():
        if not name.startswith(_OPTIONS):
            continue
        param = f"metadata.{name}"
        if name == "millrace.priority":
            found["priority"] = whole_number(param, value, 0, 9)
        elif name == "millrace.model":
            found["model"] = value
        elif name == "millrace.on_done":
            found["on_done"] = value
        elif name == "millrace.strict" and value in ("true", "false"):
            found["strict"] = value == "true"
        else:
            accepted = "millrace.priority (0 to 9), millrace.model (a name), millrace.strict (true or false), "
            accepted += "millrace.on_done (a URL or a task)"
            raise ApiError(f"{param[:80]} is {value[:80]!r}; accepted: {accepted}", param=param[:80])
    return found


def _window_s(window: str) -> float:
    """Seconds of a completion window. Raises ApiError."""
    match = _WINDOW.fullmatch(window)
    if match is None:
        accepted = "24h, or another number with s, m, h or d"
        raise ApiError(f"completion_window is {window[:64]!r}; accepted: {accepted}", param="completion_window")
    return float(int(match[1]) * _UNITS_S[match[2]])
