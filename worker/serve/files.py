"""Answers `/v1/files`: uploads, and the files that a job's lines and records are to OpenAI's clients."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from worker.records.record import BatchFile
from worker.registry.errors import FileUnknown, InvalidJobId, JobNotFound
from worker.registry.exchange import perform_async
from worker.registry.files import StoredFile
from worker.schemas import JobStatus
from worker.serve.answers import read_query, whole_number
from worker.serve.content import Content, Download, FileContent, RecordContent, content_response
from worker.serve.context import ServeContext
from worker.serve.errors import ApiError

MAX_LISTED = 10_000  # as OpenAI has it

_RECORD_FILES = (BatchFile.OUTPUT, BatchFile.ERROR)


@dataclass(frozen=True, slots=True)
class RecordFile:
    """A job's records with an answer, or those without, as a file."""

    job: JobStatus
    kind: BatchFile

    @property
    def id(self) -> str:
        """The file's id."""
        return self.kind.id_of(self.job.id)

    def as_object(self, num_bytes: int) -> dict[str, object]:
        """OpenAI's file object."""
        expires_at = self.job.results_expire_at
        return {
            "id": self.id,
            "object": "file",
            "bytes": num_bytes,
            "created_at": int(self.job.in_progress_at or self.job.created_at),
            "expires_at": None if expires_at is None else int(expires_at),
            "filename": f"{self.job.id}_{self.kind.value}.jsonl",
            "purpose": "batch_output",
            "status": "processed",
        }


class FileRoutes:
    """The routes of files. The input of a job that no uploaded file was made into is not kept as one."""

    def __init__(self, context: ServeContext) -> None:
        self._context = context

    def routes(self) -> Sequence[Route]:
        """Every route."""
        route = self._context.route
        return [
            route("/v1/files", self.upload, ["POST"]),
            route("/v1/files", self.list, ["GET"]),
            route("/v1/files/{file_id}", self.retrieve, ["GET"]),
            route("/v1/files/{file_id}", self.delete, ["DELETE"]),
            route("/v1/files/{file_id}/content", self.content, ["GET"]),
        ]

    async def upload(self, request: Request, tenant: str) -> Response:
        """Take a file in."""
        read_query(request, {})
        return JSONResponse(uploaded_object(await self._context.uploads.take(request, tenant)))

    async def list(self, request: Request, tenant: str) -> Response:
        """The uploaded files, a page of them."""
        query = read_query(request, {"after": "", "limit": str(MAX_LISTED), "order": "desc", "purpose": "batch"})
        limit = whole_number("limit", query["limit"], 1, MAX_LISTED)
        if query["order"] not in ("asc", "desc"):
            raise ApiError(f"order is {query['order'][:64]!r}; accepted: asc or desc", param="order")
        if query["purpose"] != "batch":
            problem = f"purpose is {query['purpose'][:64]!r}; accepted: batch (a batch object names its output)"
            raise ApiError(problem, param="purpose")
        found = await perform_async(self._context.redis, self._context.files.all(tenant))
        found = found if query["order"] == "desc" else found[::-1]
        if query["after"]:
            places = [place for place, file in enumerate(found, 1) if file.id == query["after"]]
            if not places:
                raise FileUnknown(query["after"])
            found = found[places[0] :]
        return JSONResponse(page_of([uploaded_object(file) for file in found[:limit]], has_more=len(found) > limit))

    async def retrieve(self, request: Request, tenant: str) -> Response:
        """What is known of a file."""
        read_query(request, {})
        file = await self._file(request, tenant)
        if isinstance(file, StoredFile):
            return JSONResponse(uploaded_object(file))
        return JSONResponse(file.as_object(await self._content(file).num_bytes()))

    async def content(self, request: Request, tenant: str) -> Response:
        """A file's lines."""
        read_query(request, {})
        file = await self._file(request, tenant)
        with ExitStack() as place:
            place.enter_context(self._context.downloads.taken(tenant))
            response = await content_response(request, self._content(file), file.id)
            if isinstance(response, Download):
                response.place = place.pop_all()
        return response

    async def delete(self, request: Request, tenant: str) -> Response:
        """Forget a file. A job's only file goes with the job; of two neither does, since both would."""
        read_query(request, {})
        file = await self._file(request, tenant)
        if isinstance(file, StoredFile):
            await perform_async(self._context.redis, self._context.files.delete(tenant, file.id))
        else:
            counts = file.job.request_counts
            if counts.completed and counts.failed:
                told = f"it is one of two files of the batch; accepted: DELETE /v1/batches/{file.job.id}, for both"
                raise ApiError(told, status=409, code="conflict")
            await self._context.jobs.delete(file.job.id)
        return JSONResponse({"id": file.id, "object": "file", "deleted": True})

    async def _file(self, request: Request, tenant: str) -> StoredFile | RecordFile:
        """The file that the URL names. Raises FileUnknown for what is none of this tenant's."""
        file_id = request.path_params["file_id"]
        kind = next((kind for kind in _RECORD_FILES if file_id.endswith(f"-{kind}")), None)
        if kind is None:
            return await perform_async(self._context.redis, self._context.files.find(tenant, file_id))
        try:
            job = await self._context.job_of(tenant, file_id.removeprefix("file-").removesuffix(f"-{kind}"))
        except (JobNotFound, InvalidJobId):
            raise FileUnknown(file_id) from None
        file = RecordFile(job, kind)
        counts = job.request_counts
        is_there = counts.completed if kind is BatchFile.OUTPUT else counts.failed
        if file.id != file_id or (job.status.is_terminal and not is_there):
            raise FileUnknown(file_id)
        return file

    def _content(self, file: StoredFile | RecordFile) -> Content:
        if isinstance(file, StoredFile):
            return FileContent(self._context.redis, self._context.files, file)
        return RecordContent(self._context.redis, self._context.queries, file.job, file.kind)


def uploaded_object(file: StoredFile) -> dict[str, object]:
    """OpenAI's object of an uploaded file."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": "batch",
        "status": "processed",
    }


def page_of(objects: Sequence[dict[str, object]], *, has_more: bool) -> dict[str, object]:
    """OpenAI's list object; the last one's id is the cursor of the next page."""
    first, last = (objects[0]["id"], objects[-1]["id"]) if objects else (None, None)
    return {"object": "list", "data": list(objects), "first_id": first, "last_id": last, "has_more": has_more}
