"""Describes every route of the API: the OpenAPI document at `/openapi.json`, and the same for people at `/docs`.

A test walks the routes and holds them to this; another draws requests from it and holds the answers to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from worker.schemas import JobState
from worker.serve.batches import LISTED, MAX_LISTED, NewBatch
from worker.serve.files import MAX_LISTED as MAX_LISTED_FILES
from worker.serve.html import Pages
from worker.serve.uploads import LEAST_TTL_S, MAX_FIELD_BYTES, MAX_IDEMPOTENCY_KEY, MOST_TTL_S

Schema = dict[str, object]

JSON, JSONL, FORM = "application/json", "application/jsonl", "multipart/form-data"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"

# What any request may be answered with: it is wrong, has no key or one of no use here, names another host, comes when
# there is no room, or when Redis cannot be had.
_ALWAYS = (400, 401, 403, 421, 429, 431, 503)
_SAYS = {
    400: "The request is wrong: `param` names the field.",
    401: "No key, or one that is not known.",
    403: "The key is for something else, or a page of another site asks.",
    404: "There is none, or it is another tenant's.",
    408: "The body stopped coming.",
    409: "It is not in a state for that, or an idempotency key came with other lines.",
    413: "The body is too large.",
    415: "The body is of another type.",
    416: "The range lies behind the end.",
    421: "A server without keys is asked under another machine's name.",
    429: "There is no room now: Retry-After says when to come back.",
    431: "The headers are too long.",
    503: "Redis cannot be had, or does not answer.",
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """Something beside the body. Those of a path are required, others not."""

    place: str  # path, query or header
    name: str
    says: str
    schema: Mapping[str, object]

    def as_object(self) -> Schema:
        """OpenAPI's parameter object."""
        known = {"name": self.name, "in": self.place, "description": self.says, "schema": dict(self.schema)}
        return {**known, "required": self.place == "path"}


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a route."""

    name: str  # by which generated clients call it
    says: str
    answer: str  # a schema's name; "": text
    answer_type: str = JSON
    body: str = ""  # a schema's name; "": there is none
    body_type: str = JSON
    parameters: Sequence[Parameter] = ()
    statuses: Sequence[int] = ()  # of refusals, beside those of any request
    successes: Sequence[int] = (200,)
    needs_key: bool = True

    def as_object(self) -> Schema:
        """OpenAPI's operation object."""
        shown: Schema = _of(self.answer) if self.answer else {"type": "string"}
        answers = {str(code): _answer("It is done.", self.answer_type, shown) for code in self.successes}
        refusals = sorted({*self.statuses, *(_ALWAYS if self.needs_key else (431,))})
        for code in refusals:
            answers.setdefault(str(code), _answer(_SAYS[code], JSON, _of("Error")))
        found: Schema = {"operationId": self.name, "summary": self.says, "responses": answers}
        if self.parameters:
            found["parameters"] = [parameter.as_object() for parameter in self.parameters]
        if self.body:
            found["requestBody"] = {"required": True, "content": {self.body_type: {"schema": _of(self.body)}}}
        if not self.needs_key:
            found["security"] = []
        return found


def _of(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _answer(says: str, media_type: str, schema: Schema) -> Schema:
    return {"description": says, "content": {media_type: {"schema": schema}}}


def _text(**more: object) -> Schema:
    return {"type": "string", **more}


def _whole(**more: object) -> Schema:
    return {"type": "integer", **more}


_TEXT, _WHOLE = _text(), _whole()
_TRUTH: Schema = {"type": "boolean"}
_MAYBE_TEXT: Schema = {"type": ["string", "null"]}
_MAYBE_WHOLE: Schema = {"type": ["integer", "null"]}


def _list_of(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def _object(**fields: Schema) -> Schema:
    """With all of these fields and no other."""
    return {"type": "object", "required": list(fields), "properties": fields, "additionalProperties": False}


def _page_of(name: str) -> Schema:
    return _object(
        object=_text(const="list"), data=_list_of(_of(name)), first_id=_MAYBE_TEXT, last_id=_MAYBE_TEXT, has_more=_TRUTH
    )


def _batch() -> Schema:
    error = _object(code=_TEXT, message=_TEXT, line=_MAYBE_WHOLE, param=_MAYBE_TEXT)
    errors: Schema = {"oneOf": [{"type": "null"}, _object(object=_text(const="list"), data=_list_of(error))]}
    times = ("in_progress", "expires", "finalizing", "cancelling", "completed", "failed", "expired", "cancelled")
    usage = _object(
        input_tokens=_WHOLE,
        input_tokens_details=_object(cached_tokens=_WHOLE),
        output_tokens=_WHOLE,
        output_tokens_details=_object(reasoning_tokens=_WHOLE),
        total_tokens=_WHOLE,
    )
    return _object(
        id=_TEXT, object=_text(const="batch"), endpoint=_TEXT, model=_MAYBE_TEXT, errors=errors, input_file_id=_TEXT,
        completion_window=_TEXT, status=_text(enum=[state.value for state in JobState]), output_file_id=_MAYBE_TEXT,
        error_file_id=_MAYBE_TEXT, created_at=_WHOLE, **{f"{time}_at": _MAYBE_WHOLE for time in times},
        request_counts=_object(total=_WHOLE, completed=_WHOLE, failed=_WHOLE), usage=usage,
        metadata={"type": "object", "additionalProperties": _TEXT}, results_expire_at=_MAYBE_WHOLE,
        result_bytes=_WHOLE, shards_total=_WHOLE, shards_done=_WHOLE, priority=_WHOLE, tenant=_TEXT,
        waiting_for=_list_of(_TEXT),
    )  # fmt: skip


def _upload() -> Schema:
    """A form, whose fields have at most MAX_FIELD_BYTES each."""
    seconds = _text(pattern="^[0-9]+$", description=f"Seconds that it is kept, {LEAST_TTL_S} to {MOST_TTL_S}.")
    return {
        "type": "object",
        "required": ["file", "purpose"],
        "properties": {
            "file": _text(format="binary", description="Request lines, JSONL, not compressed."),
            "purpose": _text(const="batch"),
            "expires_after[anchor]": _text(const="created_at", maxLength=MAX_FIELD_BYTES),
            "expires_after[seconds]": seconds,
        },
        "additionalProperties": False,
    }


def schemas() -> dict[str, Schema]:
    """What goes in and out, by name."""
    new_batch = NewBatch.model_json_schema(ref_template="#/components/schemas/{model}")
    parts = new_batch.pop("$defs", {})
    return {
        "Error": _object(error=_object(message=_TEXT, type=_TEXT, param=_MAYBE_TEXT, code=_MAYBE_TEXT)),
        "Health": _object(status=_text(enum=["ok", "unavailable"]), reasons=_list_of(_TEXT)),
        "File": _object(
            id=_TEXT, object=_text(const="file"), bytes=_WHOLE, created_at=_WHOLE, expires_at=_MAYBE_WHOLE,
            filename=_TEXT, purpose=_text(enum=["batch", "batch_output"]), status=_text(const="processed"),
        ),
        "FileList": _page_of("File"),
        "Upload": _upload(),
        **parts,
        "NewBatch": new_batch,
        "Batch": _batch(),
        "BatchList": _page_of("Batch"),
        "Model": _object(
            id=_TEXT, object=_text(const="model"), created=_WHOLE, owned_by=_TEXT, max_model_len=_WHOLE
        ),
        "ModelList": _object(object=_text(const="list"), data=_list_of(_of("Model"))),
        "Deleted": _object(id=_TEXT, object=_text(enum=["file", "batch"]), deleted={"const": True}),
    }  # fmt: skip


_FILE_ID = Parameter("path", "file_id", "An uploaded file, or one of the two that a batch names.", _TEXT)
_JOB_ID = Parameter("path", "job_id", "A batch.", _TEXT)
_MODEL = Parameter("path", "model", "A name of a model; it may have slashes.", _TEXT)
_AGAIN = Parameter(
    "header", "Idempotency-Key", "A second request with it is answered as the first one was.",
    _text(minLength=1, maxLength=MAX_IDEMPOTENCY_KEY),
)  # fmt: skip
_AFTER = Parameter("query", "after", "The id that the page before ended with.", _TEXT)
_RANGE = Parameter("header", "Range", "One range of bytes, to go on with a download: `bytes=1000-`.", _TEXT)
_SAME = Parameter("header", "If-Range", "The ETag of what was read before: of another file all is sent.", _TEXT)
_ORDER = Parameter("query", "order", "By when they came.", _text(enum=["asc", "desc"], default="desc"))
_PURPOSE = Parameter("query", "purpose", "No other kind is listed.", _text(const="batch"))


def _limit(most: int, usual: int) -> Parameter:
    return Parameter("query", "limit", "How many at most.", _whole(minimum=1, maximum=most, default=usual))


_LIST_FILES = (_AFTER, _limit(MAX_LISTED_FILES, MAX_LISTED_FILES), _ORDER, _PURPOSE)

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/files"): Operation(
        "upload_file", "Upload request lines.", "File", body="Upload", body_type=FORM, parameters=(_AGAIN,),
        statuses=(408, 409, 413, 415),
    ),
    ("GET", "/v1/files"): Operation(
        "list_files", "List the uploaded files.", "FileList", parameters=_LIST_FILES, statuses=(404,)
    ),
    ("GET", "/v1/files/{file_id}"): Operation(
        "retrieve_file", "Say what is known of a file.", "File", parameters=(_FILE_ID,), statuses=(404,)
    ),
    ("DELETE", "/v1/files/{file_id}"): Operation(
        "delete_file", "Forget a file.", "Deleted", parameters=(_FILE_ID,), statuses=(404, 409)
    ),
    ("GET", "/v1/files/{file_id}/content"): Operation(
        "download_file",
        "Download a file's lines; of a batch that runs those there are so far (X-Incomplete, X-Last-Line).",
        "", JSONL, parameters=(_FILE_ID, _RANGE, _SAME), statuses=(404, 416), successes=(200, 206),
    ),
    ("POST", "/v1/batches"): Operation(
        "create_batch", "Submit an uploaded file as a batch.", "Batch", body="NewBatch", parameters=(_AGAIN,),
        statuses=(404, 408, 409, 413),
    ),
    ("GET", "/v1/batches"): Operation(
        "list_batches", "List the batches, the newest first.", "BatchList",
        parameters=(_AFTER, _limit(MAX_LISTED, LISTED)), statuses=(404,),
    ),
    ("GET", "/v1/batches/{job_id}"): Operation(
        "retrieve_batch", "Say how far a batch is.", "Batch", parameters=(_JOB_ID,), statuses=(404,)
    ),
    ("DELETE", "/v1/batches/{job_id}"): Operation(
        "delete_batch", "Forget a batch that has ended, with its output. OpenAI has no such call.", "Deleted",
        parameters=(_JOB_ID,), statuses=(404, 409),
    ),
    ("POST", "/v1/batches/{job_id}/cancel"): Operation(
        "cancel_batch", "Cancel a batch.", "Batch", parameters=(_JOB_ID,), statuses=(404, 409)
    ),
    ("GET", "/v1/models"): Operation("list_models", "List the models that workers serve now.", "ModelList"),
    ("GET", "/v1/models/{model}"): Operation(
        "retrieve_model", "Say what is known of a model.", "Model", parameters=(_MODEL,), statuses=(404,)
    ),
    ("GET", "/healthz"): Operation(
        "health", "Say whether Redis answers.", "Health", successes=(200, 503), needs_key=False
    ),
    ("GET", "/metrics"): Operation(
        "metrics", "Give all metrics, for a key of `millrace keys create --metrics`.", "", PROMETHEUS
    ),
}  # fmt: skip


def document() -> Schema:
    """The OpenAPI document."""
    paths: dict[str, Schema] = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(path, {})[method.lower()] = operation.as_object()
    key = {"type": "http", "scheme": "bearer", "description": "A key of `millrace keys create --tenant NAME`."}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Millrace", "version": "1", "description": "OpenAI's Files and Batches API, and ours."},
        "paths": paths,
        "components": {"schemas": schemas(), "securitySchemes": {"key": key}},
        "security": [{"key": []}],
    }


def document_routes(pages: Pages) -> Sequence[Route]:
    """The routes of the document and of its page, which want no key: they tell nothing of any job."""
    known = document()
    page = {"operations": OPERATIONS, "schemas": schemas(), "says": _SAYS, "always": _ALWAYS}

    async def as_json(_request: Request) -> Response:
        return JSONResponse(known)

    async def as_page(_request: Request) -> Response:
        return pages.response("docs.html", page)

    return [Route("/openapi.json", as_json), Route("/docs", as_page)]
