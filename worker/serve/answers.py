"""Turns errors of the registry and of HTTP into OpenAI's error objects, and reads what a request says."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import AsyncIterator, Mapping
from typing import TypeVar

import redis
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from settings import SettingsError
from worker.lines.strict_json import shorten
from worker.registry import errors
from worker.registry.intake import is_out_of_memory
from worker.serve.errors import ApiError, ServerFault, TooMuch, Unavailable

MAX_BODY_BYTES = 64 * 1024  # of a request in JSON: 16 pairs of metadata have 9 kB

Body = TypeVar("Body", bound=BaseModel)

_MEMBER = re.compile(r"<\w+\.\w+: ('[^']*')>")  # as Python writes a member of an enumeration
_PASSING = (errors.NotDurable, errors.FunctionsMissing, errors.JobIncomplete, errors.LinesChanged, errors.FileChanged)
# By type, the first that fits.
_STATUSES: Mapping[tuple[type[errors.RegistryError], ...], int] = {
    (errors.JobNotFound, errors.InvalidJobId, errors.FileUnknown): 404,
    (errors.JobReused, errors.FileReused, errors.JobNotEnded): 409,
    (errors.JobTooLarge,): 413,
    (errors.InvalidSubmission,): 400,
}
_CODES = {404: "not_found", 409: "conflict"}

logger = logging.getLogger(__name__)


def error_response(error: ApiError) -> Response:
    """The answer that a refusal is."""
    body = {"error": {"message": str(error), "type": error.kind, "param": error.param, "code": error.code}}
    headers = {} if error.retry_after_s is None else {"Retry-After": str(math.ceil(error.retry_after_s))}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 408:  # RFC 9110: what came of the body so far is followed by nothing that can be read
        headers["Connection"] = "close"
    return JSONResponse(body, error.status, headers)


def refusal_of(error: Exception) -> ApiError | None:
    """What an error of the registry, of Redis or of the settings is to a client; None for a fault of ours."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, errors.RedisFull) or is_out_of_memory(error):
        return Unavailable("Redis has no memory left: delete jobs and files that are done with, or raise its maxmemory")
    if isinstance(error, (redis.RedisError, OSError)):
        logger.warning("Redis cannot be had: %s", error)
        return Unavailable("Redis cannot be had", retry_after_s=1)
    if isinstance(error, SettingsError):
        logger.error("a setting is wrong: %s", error)
        return Unavailable("the server's settings do not allow it, see its log")
    return _of_registry(error) if isinstance(error, errors.RegistryError) else None


def _of_registry(error: errors.RegistryError) -> ApiError:
    if isinstance(error, errors.QueueFull):
        return TooMuch(str(error), error.code, error.retry_after_s)
    if isinstance(error, errors.TooManyFiles):
        return TooMuch(str(error), "too_many_files", None)
    if isinstance(error, _PASSING):
        return Unavailable(str(error), retry_after_s=1)
    for kinds, status in _STATUSES.items():
        if isinstance(error, kinds):
            param = error.name if isinstance(error, errors.InvalidOption) else None
            return ApiError(str(error), status=status, param=param, code=_CODES.get(status, error.code))
    return Unavailable(str(error))  # records that Redis has lost


async def on_http_error(request: Request, error: Exception) -> Response:
    """A path or a method that is not there."""
    if not isinstance(error, HTTPException):
        return error_response(ServerFault())
    path, headers = shorten(request.url.path), error.headers or {}
    if error.status_code == 405:
        told = f"{path} does not take {shorten(request.method)}; accepted: {headers.get('Allow', 'another method')}"
        refusal = ApiError(told, status=405, code="method_not_allowed")
    else:
        told = f"no such URL: {shorten(request.method)} {path}"
        refusal = ApiError(told, status=error.status_code, code="unknown_url")
    response = error_response(refusal)
    response.headers.update(headers)
    return response


async def body_parts(request: Request, timeout_s: float) -> AsyncIterator[bytes]:
    """The body as it comes. Raises ApiError where it ends early, or nothing of it comes for `timeout_s`."""
    stream = aiter(request.stream())
    while True:
        try:
            chunk = await asyncio.wait_for(anext(stream), timeout_s)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise ApiError(f"nothing came for {timeout_s:g} s", status=408) from None
        except ClientDisconnect:
            raise ApiError("the body ends early") from None
        yield chunk


async def read_body(request: Request, kind: type[Body], timeout_s: float) -> Body:
    """The body of a request in JSON, see body_parts. Raises ApiError for one too large or not of this kind."""
    raw = bytearray()
    async for chunk in body_parts(request, timeout_s):
        raw += chunk
        if len(raw) > MAX_BODY_BYTES:
            raise ApiError(f"the body has more than {MAX_BODY_BYTES} bytes", status=413)
    try:
        return kind.model_validate_json(bytes(raw))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "json_invalid":
        raise ApiError(f"the body is no JSON: {first['msg']}", code="invalid_json")
    if first["type"] == "extra_forbidden":
        raise ApiError(f"unknown parameter {shorten(place)}", param=place, code="unknown_parameter")
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    told = _MEMBER.sub(r"\1", first["msg"])
    raise ApiError(f"{place or 'the body'}: {told}", param=place or None, code=code)


def read_query(request: Request, known: Mapping[str, str]) -> dict[str, str]:
    """The parameters of the URL, over their defaults. Raises ApiError for one that is unknown or there twice."""
    given = request.query_params.multi_items()
    for name, _ in given:
        if name not in known:
            accepted = ", ".join(known) or "none"
            raise ApiError(f"unknown parameter {shorten(name)}; accepted: {accepted}", param=name[:64])
    if len(dict(given)) < len(given):
        raise ApiError("a parameter of the URL is given twice", param=given[-1][0])
    return {**known, **dict(given)}


def whole_number(name: str, text: str, least: int, most: int) -> int:
    """A number of the URL or of a form. Raises ApiError naming what is accepted."""
    number = int(text) if text.isascii() and text.isdecimal() and len(text) <= 12 else -1
    if not least <= number <= most:
        raise ApiError(f"{name} is {shorten(text)}; accepted: a whole number, {least} to {most}", param=name)
    return number
