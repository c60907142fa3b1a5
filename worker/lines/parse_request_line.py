"""Raw bytes to a RequestLine, or a LineError that says what is wrong."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from settings import LimitSettings
from worker.lines.chat_body import ChatBody
from worker.lines.completion_body import CompletionBody
from worker.lines.embedding_body import EmbeddingBody
from worker.lines.endpoint import Endpoint
from worker.lines.limit_checks import check_limits
from worker.lines.line_error import LineError
from worker.lines.refusal_error import RefusalError
from worker.lines.refusal_of_pydantic import refusal_of_pydantic
from worker.lines.request_line import RequestBody, RequestLine
from worker.lines.shorten import shorten
from worker.lines.strict_json import has_surrogate, read_strict_json
from worker.lines.unsupported import without_neutral

MAX_CUSTOM_ID_CHARS = 512
_ENVELOPE_KEYS = ("custom_id", "method", "url", "body")
_ENVELOPE_MARKS = frozenset({"method", "url", "body"})
_ENDPOINTS = {endpoint.value: endpoint for endpoint in Endpoint}
_PROMPT_KEYS = {
    "messages": Endpoint.CHAT_COMPLETIONS,
    "prompt": Endpoint.COMPLETIONS,
    "input": Endpoint.EMBEDDINGS,
}
_BODIES: dict[Endpoint, type[RequestBody]] = {
    Endpoint.CHAT_COMPLETIONS: ChatBody,
    Endpoint.COMPLETIONS: CompletionBody,
    Endpoint.EMBEDDINGS: EmbeddingBody,
}


def parse_request_line(raw: bytes, index: int, limits: LimitSettings) -> RequestLine:
    """Parse line `index` (0-based) of a job, blank lines not counted: an OpenAI Batch line, or a body alone.

    A body alone may carry a custom_id beside its parameters; without one it is line-<n>, n counting from 1. Raises
    LineError, whatever the bytes are.
    """
    custom_id: str | None = None
    try:
        if len(raw) > limits.max_prompt_bytes:
            raise RefusalError(
                f"line has more than {limits.max_prompt_bytes} bytes (limits.max_prompt_bytes)",
                code="line_too_long",
            )
        parsed = read_strict_json(raw, limits.max_json_depth)
        value = parsed.value
        if not isinstance(value, dict):
            raise RefusalError(f"line is {shorten(value)}; accepted: a JSON object", code="invalid_json_line")
        custom_id = _custom_id(value, index)
        parsed.check()  # after the custom_id, so that the error record carries it
        endpoint, body = _endpoint_and_body(value)
        return RequestLine(index, custom_id, endpoint, _parse_body(body, endpoint, limits))
    except RefusalError as refusal:
        # A key may hold anything: ASCII keeps params and messages printable and encodable.
        param = None if refusal.param is None else _ascii(refusal.param)
        raise LineError(
            _ascii(refusal.message), code=refusal.code, index=index, param=param, custom_id=custom_id
        ) from refusal


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode("ascii")


def _custom_id(value: Mapping[str, object], index: int) -> str:
    if not _is_envelope(value) and "custom_id" not in value:
        return f"line-{index + 1}"  # not the bare number, which is what a producer may number its own lines with
    custom_id = value.get("custom_id")
    if custom_id is None:
        raise RefusalError("custom_id is missing", code="missing_parameter", param="custom_id")
    if not isinstance(custom_id, str):
        raise RefusalError(
            f"custom_id is {shorten(custom_id)}; accepted: a string", code="invalid_type", param="custom_id"
        )
    if has_surrogate(custom_id):
        raise RefusalError(
            "custom_id holds a lone surrogate; accepted: valid Unicode text",
            code="invalid_value",
            param="custom_id",
        )
    if not custom_id:
        raise RefusalError("custom_id is empty", code="invalid_value", param="custom_id")
    if len(custom_id) > MAX_CUSTOM_ID_CHARS:
        raise RefusalError(
            f"custom_id has {len(custom_id)} characters; accepted: at most {MAX_CUSTOM_ID_CHARS}",
            code="string_too_long",
            param="custom_id",
        )
    return custom_id


def _is_envelope(value: Mapping[str, object]) -> bool:
    return not _ENVELOPE_MARKS.isdisjoint(value)


def _endpoint_and_body(value: Mapping[str, object]) -> tuple[Endpoint, Mapping[str, object]]:
    if _is_envelope(value):
        return _open_envelope(value)
    body = {key: item for key, item in value.items() if key != "custom_id"}
    named = [key for key in _PROMPT_KEYS if body.get(key) is not None]
    if not named:
        raise RefusalError(
            "line has neither prompt, messages, input nor body", code="missing_parameter", param="prompt"
        )
    if len(named) > 1:
        raise RefusalError(
            f"line has {' and '.join(named)}; accepted: one of them", code="invalid_value", param="prompt"
        )
    return _PROMPT_KEYS[named[0]], body


def _open_envelope(value: Mapping[str, object]) -> tuple[Endpoint, Mapping[str, object]]:
    for key in value:
        if key not in _ENVELOPE_KEYS:
            raise RefusalError(
                f"unknown field {shorten(key)} beside custom_id, method, url and body",
                code="unknown_parameter",
                param=key,
            )
    for key in _ENVELOPE_KEYS:
        if value.get(key) is None:
            raise RefusalError(f"{key} is missing", code="missing_parameter", param=key)
    if value["method"] != "POST":
        raise RefusalError(
            f'method is {shorten(value["method"])}; accepted: "POST"', code="invalid_value", param="method"
        )
    endpoint = _endpoint(value["url"])
    body = value["body"]
    if not isinstance(body, dict):
        raise RefusalError(f"body is {shorten(body)}; accepted: an object", code="invalid_type", param="body")
    for key, owner in _PROMPT_KEYS.items():
        if owner is not endpoint and body.get(key) is not None:
            raise RefusalError(
                f"url is {endpoint}, but body has {key}, which {owner} takes",
                code="url_mismatch",
                param="url",
            )
    return endpoint, body


def _endpoint(url: object) -> Endpoint:
    endpoint = _ENDPOINTS.get(url) if isinstance(url, str) else None
    if endpoint is not None:
        return endpoint
    raise RefusalError(f"url is {shorten(url)}; accepted: {' or '.join(Endpoint)}", code="unknown_url", param="url")


def _parse_body(body: Mapping[str, object], endpoint: Endpoint, limits: LimitSettings) -> RequestBody:
    model = _BODIES[endpoint]
    try:
        parsed = model.model_validate(without_neutral(body, endpoint), context=limits)
    except ValidationError as error:
        raise refusal_of_pydantic(error, model) from error
    check_limits(parsed, limits)
    return parsed
