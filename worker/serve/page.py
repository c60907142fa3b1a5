"""The pages: a tenant's jobs with what can be done to them, and signing in. They need no script; one keeps them live.

A browser sends its key in a cookie that no script reads and no other site can have it send; the API takes none. What
changes something also has to come from a page of this server.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from urllib.parse import parse_qs, quote

import redis
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from worker.records.record import BatchFile
from worker.registry.errors import FileUnknown, RegistryError
from worker.registry.exchange import perform_async
from worker.schemas import JobState, SubmitArguments
from worker.serve.access import Slots, check_same_site
from worker.serve.answers import MAX_BODY_BYTES, body_parts, read_query, refusal_of
from worker.serve.content import Download, RecordContent, content_response
from worker.serve.context import ServeContext
from worker.serve.errors import ApiError, KeyRefused, ServerFault
from worker.serve.html import HEADERS, Pages
from worker.serve.live import EventStream, JobView, Views, duration, moment
from worker.serve.uploads import FIELDS

COOKIE = "millrace_key"
SECURE_COOKIE = f"__Host-{COOKIE}"  # a browser lets no sibling site, and no page without TLS, set one of such a name
MAX_KEY = 256
MAX_FIELDS = 16  # of the form that one signs in with
SHOWN_JOBS = 50
MODEL_FIELD = "model"
ONCE_FIELD = "once"  # drawn anew with each page, so that a form that is sent twice makes one job

logger = logging.getLogger(__name__)

Handler = Callable[[Request, str], Awaitable[Response]]

_FILES = {"output": BatchFile.OUTPUT, "errors": BatchFile.ERROR}


class PageRoutes:
    """The routes of the pages."""

    def __init__(self, context: ServeContext, pages: Pages) -> None:
        self._context = context
        self._pages = pages
        self._views = Views(context)
        self._streams = Slots("streams", context.settings.serve.max_streams)

    def routes(self) -> Sequence[Route]:
        """Every route."""
        return [
            Route("/", self._shown(self._jobs), methods=["GET"]),
            Route("/events", self._shown(self._job_events), methods=["GET"]),
            Route("/sign-in", self._answered(self._sign_in_form), methods=["GET"]),
            Route("/sign-in", self._answered(self._sign_in), methods=["POST"]),
            Route("/sign-out", self._answered(self._sign_out), methods=["POST"]),
            Route("/jobs", self._changing(self._submit), methods=["POST"]),
            Route("/jobs/{job_id}", self._shown(self._job), methods=["GET"]),
            Route("/jobs/{job_id}/events", self._shown(self._events_of_job), methods=["GET"]),
            Route("/jobs/{job_id}/cancel", self._changing(self._cancel), methods=["POST"]),
            Route("/jobs/{job_id}/retry", self._changing(self._retry), methods=["POST"]),
            Route("/jobs/{job_id}/delete", self._changing(self._delete), methods=["POST"]),
            Route("/jobs/{job_id}/{file:str}.jsonl", self._shown(self._download), methods=["GET"]),
        ]

    # What every route does first.

    def _answered(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
        """The handler with its errors as pages; without a key, or with a wrong one, the form that asks for one."""

        async def endpoint(request: Request) -> Response:
            try:
                return await handler(request)
            except Exception as error:  # a seam, as `answered` is
                refusal = refusal_of(error)
                if refusal is None:
                    logger.exception("a page could not be made")
                    refusal = ServerFault()
            if isinstance(refusal, KeyRefused):
                return _to("/sign-in")
            return self._pages.response("error.html", {"error": refusal}, refusal.status)

        return endpoint

    def _shown(self, handler: Handler) -> Callable[..., Awaitable[Response]]:
        async def for_tenant(request: Request) -> Response:
            key = _key_of_cookie(request)
            return await handler(request, await self._context.gate.tenant_with(request, key))

        return self._answered(for_tenant)

    def _changing(self, handler: Handler) -> Callable[..., Awaitable[Response]]:
        async def for_tenant(request: Request) -> Response:
            check_same_site(request)
            key = _key_of_cookie(request)
            return await handler(request, await self._context.gate.tenant_with(request, key))

        return self._answered(for_tenant)

    # Signing in.

    async def _sign_in_form(self, request: Request) -> Response:
        read_query(request, {})
        return self._pages.response("sign_in.html", {"is_refused": False})

    async def _sign_in(self, request: Request) -> Response:
        check_same_site(request)
        key = (await self._form(request)).get("key", "").strip()
        try:
            if not 0 < len(key) <= MAX_KEY:
                raise KeyRefused("no key was given")
            await self._context.gate.tenant_with(request, key)
        except KeyRefused:
            return self._pages.response("sign_in.html", {"is_refused": True}, 401)
        response = _to("/")
        is_secure = _is_secure(request)
        response.set_cookie(
            SECURE_COOKIE if is_secure else COOKIE, key, httponly=True, samesite="strict", secure=is_secure
        )
        return response

    async def _sign_out(self, request: Request) -> Response:
        check_same_site(request)
        response = _to("/sign-in")
        response.delete_cookie(COOKIE, httponly=True, samesite="strict")
        response.delete_cookie(SECURE_COOKIE, httponly=True, samesite="strict", secure=True)
        return response

    async def _form(self, request: Request) -> dict[str, str]:
        raw = bytearray()
        async for part in body_parts(request, self._context.settings.serve.read_timeout_s):
            raw += part
            if len(raw) > MAX_BODY_BYTES:
                raise ApiError(f"the form has more than {MAX_BODY_BYTES} bytes", status=413)
        try:
            found = parse_qs(raw.decode("utf-8", "replace"), max_num_fields=MAX_FIELDS)
        except ValueError:
            raise ApiError(f"the form has more than {MAX_FIELDS} fields") from None
        return {name: values[0] for name, values in found.items()}

    # What is shown.

    async def _jobs(self, request: Request, tenant: str) -> Response:
        read_query(request, {})
        shown = {**await self._overview(tenant), "once": secrets.token_hex(16)}
        return self._pages.response("jobs.html", shown)

    async def _job_events(self, request: Request, tenant: str) -> Response:
        read_query(request, {})

        async def parts() -> str:
            return self._pages.text("jobs_live.html", await self._overview(tenant))

        return self._stream(request, tenant, parts)

    async def _overview(self, tenant: str) -> dict[str, object]:
        found = await self._views.overview(tenant, SHOWN_JOBS)
        return {**self._common(tenant), "overview": found, "shown": SHOWN_JOBS}

    async def _job(self, request: Request, tenant: str) -> Response:
        read_query(request, {})
        view = await self._views.job(tenant, request.path_params["job_id"])
        return self._pages.response("job.html", self._of_job(tenant, view))

    async def _events_of_job(self, request: Request, tenant: str) -> Response:
        read_query(request, {})
        job_id = request.path_params["job_id"]
        await self._views.job(tenant, job_id)  # whose it is, before anything is sent

        async def parts() -> str:
            try:
                view = await self._views.job(tenant, job_id)
            except RegistryError:
                return ""  # deleted meanwhile: the page says so when it is loaded again
            return self._pages.text("job_live.html", self._of_job(tenant, view))

        return self._stream(request, tenant, parts)

    def _of_job(self, tenant: str, view: JobView) -> dict[str, object]:
        return {**self._common(tenant), "view": view, "job": view.job}

    def _common(self, tenant: str) -> dict[str, object]:
        return {"tenant": tenant, "duration": duration, "moment": moment}

    def _stream(self, request: Request, tenant: str, parts: Callable[[], Awaitable[str]]) -> Response:
        if request.method == "HEAD":
            return Response(headers=HEADERS, media_type="text/event-stream")
        with ExitStack() as place:
            place.enter_context(self._streams.taken(tenant))
            return EventStream(parts, self._context.stopping, place.pop_all())

    async def _download(self, request: Request, tenant: str) -> Response:
        read_query(request, {})
        job = await self._context.job_of(tenant, request.path_params["job_id"])
        kind = _FILES.get(request.path_params["file"])
        if kind is None:
            raise ApiError("there is no such file; accepted: output.jsonl, errors.jsonl", status=404)
        content = RecordContent(self._context.redis, self._context.queries, job, kind)
        with ExitStack() as place:
            place.enter_context(self._context.downloads.taken(tenant))
            response = await content_response(request, content, kind.id_of(job.id))
            if isinstance(response, Download):
                response.place = place.pop_all()
        response.headers["Content-Disposition"] = f'attachment; filename="{job.id}_{kind}.jsonl"'
        response.headers.update(HEADERS)
        return response

    # What is done.

    async def _submit(self, request: Request, tenant: str) -> Response:
        """A file that is dropped, as a job; it is not kept beside the job."""
        read_query(request, {})
        file, fields = await self._context.uploads.take_form(request, tenant, (*FIELDS, MODEL_FIELD, ONCE_FIELD))
        options: SubmitArguments = {"tenant": tenant, "metadata": {"file": file.filename}}
        model = fields.get(MODEL_FIELD, b"").decode("utf-8", "replace").strip()
        if model:
            options["model"] = model
        if once := fields.get(ONCE_FIELD):
            # With what is sent: a browser may go back to the same page, and send another file from it.
            sent = b"\0".join((once, model.encode(), file.digest.encode()))
            options["idempotency_key"] = f"page:{hashlib.sha256(sent).hexdigest()}"
        try:
            job_id = await self._context.jobs.submit(file, **options)
        finally:
            # The job is accepted, or was refused, whatever becomes of the file: that goes after serve.file_ttl_s.
            with suppress(FileUnknown, redis.RedisError, OSError):
                await perform_async(self._context.redis, self._context.files.delete(tenant, file.id))
        return _to(f"/jobs/{quote(job_id)}")

    async def _cancel(self, request: Request, tenant: str) -> Response:
        job = await self._context.job_of(tenant, request.path_params["job_id"])
        if job.status.is_terminal and job.status is not JobState.CANCELLED:
            raise ApiError(f"the job is {job.status}: there is nothing to cancel", status=409)
        await self._context.jobs.cancel(job.id)
        return _to(f"/jobs/{quote(job.id)}")

    async def _retry(self, request: Request, tenant: str) -> Response:
        job = await self._context.job_of(tenant, request.path_params["job_id"])
        retried = await self._context.jobs.retry(job.id, idempotency_key=f"retry:{job.id}")  # once, however often sent
        return _to(f"/jobs/{quote(retried)}")

    async def _delete(self, request: Request, tenant: str) -> Response:
        job = await self._context.job_of(tenant, request.path_params["job_id"])
        await self._context.jobs.delete(job.id)
        await self._views.forget(tenant)  # else the next page would still show it
        return _to("/")


def _is_secure(request: Request) -> bool:
    """Whether a POST is of a page that came by TLS, whoever ended that: the browser says how it asked."""
    return request.headers.get("origin", "").startswith("https://")


def _key_of_cookie(request: Request) -> str | None:
    """The key that the browser keeps. Raises ApiError where it has two, of which another site may have set one.

    A GET does not say whether it came by TLS, so the plain name is read there if the secure one is missing.
    """
    given = ";".join(request.headers.getlist("cookie")).split(";")
    names = [cookie.partition("=")[0].strip() for cookie in given]
    for name in (SECURE_COOKIE, COOKIE):
        if names.count(name) > 1:
            raise ApiError(f"the cookie {name} came twice; accepted: once. Clear this site's cookies", param="Cookie")
    secure = request.cookies.get(SECURE_COOKIE)
    return secure if secure is not None or _is_secure(request) else request.cookies.get(COOKIE)


def _to(path: str) -> Response:
    """Have the browser get another page, with a GET."""
    return RedirectResponse(path, 303, HEADERS)
