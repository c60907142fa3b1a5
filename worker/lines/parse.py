"""Parses raw bytes to a RequestLine, or raises a LineError that says what is wrong.

It also turns pydantic's errors into ours, and checks the operator's limits. All faults of a line are told, as far as
one does not hide another: of a line that is no JSON nothing else is known.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from settings import LimitSettings
from worker.lines.bodies import CompletionBody, EmbeddingBody, InputBody
from worker.lines.chat import ChatBody
from worker.lines.errors import LineError, RefusalError
from worker.lines.fields import BodyModel
from worker.lines.ignored import ENVELOPE_MARKS, without_neutral
from worker.lines.request_line import PROMPT_KEYS, Endpoint, RequestBody, RequestLine
from worker.lines.responses import ResponsesBody, ResponsesChat, responses_name
from worker.lines.scoring import ClassifyBody, PairBody, RerankBody, ScoreBody
from worker.lines.strict_json import StrictJson, has_surrogate, read_strict_json, shorten

MAX_CUSTOM_ID_CHARS = 512
# What an envelope has besides custom_id, and what each accepts.
_NEEDED = {"method": '"POST"', "url": " or ".join(Endpoint), "body": "an object"}
_ENVELOPE_KEYS = ("custom_id", *_NEEDED)
# Azure writes a path without /v1, and so does vLLM, which has two for reranking.
_ENDPOINTS = {path: endpoint for endpoint in Endpoint for path in (endpoint.value, endpoint.value.removeprefix("/v1"))}
_ENDPOINTS["/v2/rerank"] = Endpoint.RERANK
_BODIES: dict[Endpoint, type[RequestBody]] = {
    Endpoint.CHAT_COMPLETIONS: ChatBody,
    Endpoint.COMPLETIONS: CompletionBody,
    Endpoint.RESPONSES: ResponsesChat,
    Endpoint.EMBEDDINGS: EmbeddingBody,
    Endpoint.SCORE: ScoreBody,
    Endpoint.RERANK: RerankBody,
    Endpoint.CLASSIFY: ClassifyBody,
}

# What a line may have too many of, but for inputs. Without these it has none of them, and one answer.
_COUNTED = frozenset(
    {"tools", "n", "stop", "stop_token_ids", "allowed_token_ids", "logit_bias", "logprobs", "top_logprobs"}
)

# Characters of all pairs of a line, as a multiple of its bytes at most: a query is read once for each of its documents.
MAX_PAIRS_SIZE = 4

Body = TypeVar("Body", bound=BodyModel)

_PREFIX = "Input should be "
_ACCEPTED = {
    "int_type": "a whole number",
    "float_type": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "string_too_short": "a string that is not empty",
    "string_pattern_mismatch": "1 to 64 letters, digits, _ and - (ASCII)",  # a schema's name: nothing else has one
    "tuple_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "mapping_type": "an object",
    "none_required": "null",
    "too_short": "at least one message",  # no other list must have something in it
    "too_long": "an empty list",
}
_OWN_CODES = frozenset({"invalid_type", "invalid_value", "empty_prompt"})

_LIKELY = 0.7  # likeness from which a name is taken for a mistyped one
# Names that other services and libraries have for a parameter, too far from ours to be taken for mistyped.
_OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "max_completion_tokens": ("max_tokens",),
    "max_length": ("max_completion_tokens", "max_tokens"),
    "max_output_tokens": ("max_completion_tokens", "max_tokens"),
    "num_predict": ("max_completion_tokens", "max_tokens"),
    "num_return_sequences": ("n",),
    "stop_sequences": ("stop",),
    "json_schema": ("response_format",),
    "format": ("response_format",),
}


def parse_request_line(raw: bytes | None, index: int, limits: LimitSettings) -> RequestLine:
    """Parse line `index` (0-based) of a job, blank lines not counted: an OpenAI Batch line, or a body alone.

    A body alone may carry a custom_id beside its parameters; without one it is line-<n>, n counting from 1. `raw` is
    None for a line that is not in Redis any more. Raises LineError, whatever the bytes are.
    """
    if raw is None:
        raise LineError("the line is missing from the job's input", code="missing_line", index=index)
    try:
        parsed, value = _read_object(raw, limits)
    except RefusalError as refusal:
        raise _line_error([refusal], index, None) from refusal
    faults: list[RefusalError] = []
    custom_id = _custom_id(value, index, faults)
    faults_of_values = parsed.faults()
    faults += faults_of_values
    request = None if faults_of_values else _request(value, limits, faults)
    if request is None or custom_id is None or faults:
        raise _line_error(faults, index, custom_id)
    endpoint, body = request
    return RequestLine(index, custom_id, endpoint, body)


def _line_error(faults: Sequence[RefusalError], index: int, custom_id: str | None) -> LineError:
    refusal = RefusalError.of_all(faults)
    # A key may hold anything: ASCII keeps params and messages printable and encodable.
    param = None if refusal.param is None else _ascii(refusal.param)
    return LineError(_ascii(refusal.message), code=refusal.code, index=index, param=param, custom_id=custom_id)


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode("ascii")


def _read_object(raw: bytes, limits: LimitSettings) -> tuple[StrictJson, dict[str, object]]:
    if len(raw) > limits.max_prompt_bytes:
        message = f"line has more than {limits.max_prompt_bytes} bytes (limits.max_prompt_bytes)"
        raise RefusalError(message, code="line_too_long")
    parsed = read_strict_json(raw, limits.max_json_depth)
    if not isinstance(parsed.value, dict):
        message = f"line is {shorten(parsed.value)}; accepted: a JSON object"
        raise RefusalError(message, code="invalid_json_line")
    return parsed, parsed.value


def generated_custom_id(index: int) -> str:
    """What a body alone that has no custom_id is called: not the bare number, by which a producer may name lines."""
    return f"line-{index + 1}"


def _custom_id(value: Mapping[str, object], index: int, faults: list[RefusalError]) -> str | None:
    """The line's custom_id; None, and a fault more, where it has none that can be used."""
    if not _is_envelope(value) and "custom_id" not in value:
        return generated_custom_id(index)
    custom_id = value.get("custom_id")
    if custom_id is None:
        fault, code = "is missing", "missing_parameter"
    elif not isinstance(custom_id, str):
        fault, code = f"is {shorten(custom_id)}; accepted: a string", "invalid_type"
    elif has_surrogate(custom_id):
        fault, code = "holds a lone surrogate; accepted: valid Unicode text", "invalid_value"
    elif not custom_id:
        fault, code = "is empty", "invalid_value"
    elif len(custom_id) > MAX_CUSTOM_ID_CHARS:
        fault, code = f"has {len(custom_id)} characters; accepted: at most {MAX_CUSTOM_ID_CHARS}", "string_too_long"
    else:
        return custom_id
    faults.append(RefusalError(f"custom_id {fault}", code=code, param="custom_id"))
    return None


def _is_envelope(value: Mapping[str, object]) -> bool:
    return not ENVELOPE_MARKS.isdisjoint(value)


def _request(
    value: Mapping[str, object], limits: LimitSettings, faults: list[RefusalError]
) -> tuple[Endpoint, RequestBody] | None:
    """What the line asks for; None where that cannot be said. What is wrong with it is added to `faults`."""
    found = _open_envelope(value, faults) if _is_envelope(value) else _open_body(value, faults)
    if found is None:
        return None
    endpoint, body = found
    checked = _parse_body(body, endpoint, limits, faults)
    return None if checked is None else (endpoint, checked)


def _open_body(value: Mapping[str, object], faults: list[RefusalError]) -> tuple[Endpoint, Mapping[str, object]] | None:
    body = {key: item for key, item in value.items() if key != "custom_id"}
    named = [key for key in PROMPT_KEYS if body.get(key) is not None]
    if len(named) == 1:
        return PROMPT_KEYS[named[0]][0], body
    if named:
        message, code = f"line has {' and '.join(named)}; accepted: one of them", "invalid_value"
    else:
        message, code = f"line has neither {', '.join(PROMPT_KEYS)} nor body", "missing_parameter"
    faults.append(RefusalError(message, code=code, param="prompt"))
    return None


def _open_envelope(
    value: Mapping[str, object], faults: list[RefusalError]
) -> tuple[Endpoint, Mapping[str, object]] | None:
    for key in value:
        if key not in _ENVELOPE_KEYS:
            message = f"unknown field {shorten(key)}; accepted: custom_id, method, url and body; parameters go in body"
            faults.append(RefusalError(message, code="unknown_parameter", param=key))
    faults += [
        RefusalError(f"{key} is missing; accepted: {accepted}", code="missing_parameter", param=key)
        for key, accepted in _NEEDED.items()
        if value.get(key) is None
    ]
    if value.get("method") not in ("POST", None):
        message = f"method is {shorten(value['method'])}; accepted: {_NEEDED['method']}"
        faults.append(RefusalError(message, code="invalid_value", param="method"))
    endpoint, body = _endpoint(value.get("url"), faults), value.get("body")
    if body is not None and not isinstance(body, dict):
        accepted = _NEEDED["body"] + (", not JSON in a string" if isinstance(body, str) else "")
        faults.append(RefusalError(f"body is {shorten(body)}; accepted: {accepted}", code="invalid_type", param="body"))
    if endpoint is None or not isinstance(body, dict):
        return None
    for key, owners in PROMPT_KEYS.items():
        if endpoint not in owners and body.get(key) is not None:
            message = f"url is {endpoint}, but body has {key}, which {owners[0]} takes"
            faults.append(RefusalError(message, code="url_mismatch", param="url"))
            return None
    return endpoint, body


def _endpoint(url: object, faults: list[RefusalError]) -> Endpoint | None:
    endpoint = _ENDPOINTS.get(url) if isinstance(url, str) else None
    if endpoint is None and url is not None:
        message = f"url is {shorten(url)}; accepted: {_NEEDED['url']}"
        faults.append(RefusalError(message, code="unknown_url", param="url"))
    return endpoint


def _parse_body(
    body: Mapping[str, object], endpoint: Endpoint, limits: LimitSettings, faults: list[RefusalError]
) -> RequestBody | None:
    kept, unsupported = without_neutral(body, endpoint)
    faults += unsupported
    parsed: RequestBody | None
    if endpoint is not Endpoint.RESPONSES:
        parsed = _validated(_BODIES[endpoint], kept, limits, faults)
    else:
        asked = _validated(ResponsesBody, kept, limits, faults)
        # What is left to find is said in chat's names.
        parsed = None if asked is None else _validated(ResponsesChat, asked.as_chat(kept), limits, faults)
    if parsed is not None:
        faults += _beyond_limits(parsed, limits)
    return parsed


def _validated(
    model: type[Body], body: Mapping[str, object], limits: LimitSettings, faults: list[RefusalError]
) -> Body | None:
    try:
        return model.model_validate(body, context=limits)
    except ValidationError as error:
        found = [details for details in error.errors(include_url=False) if not _follows(details)]
        faults += (_fault(details, model) for details in found[: RefusalError.most_told + 1])
        return None


def _beyond_limits(body: RequestBody, limits: LimitSettings) -> Iterator[RefusalError]:
    """Faults of what costs memory or time out of proportion to the line's size."""
    if isinstance(body, InputBody):
        counts = [("input", len(body.input), limits.max_embedding_inputs, "max_embedding_inputs")]
    elif isinstance(body, PairBody):
        name, texts = body.sides[1]
        counts = [(name, len(texts), limits.max_embedding_inputs, "max_embedding_inputs")]
        most = MAX_PAIRS_SIZE * limits.max_prompt_bytes
        if body.num_characters > most:
            message = f"{name} makes pairs of {body.num_characters} characters together; accepted: at most {most}"
            message += f" ({MAX_PAIRS_SIZE} times limits.max_prompt_bytes)"
            yield RefusalError(message, code="invalid_value", param=name)
    elif body.model_fields_set.isdisjoint(_COUNTED):
        return
    else:
        logprobs, tools = ("top_logprobs", body.tools) if isinstance(body, ChatBody) else ("logprobs", ())
        counts = [
            ("tools", len(tools), limits.max_tools, "max_tools"),
            ("n", body.n, limits.max_n, "max_n"),
            ("stop", len(body.stop), limits.max_stop, "max_stop"),
            ("stop_token_ids", len(body.stop_token_ids), limits.max_logit_bias, "max_logit_bias"),
            ("allowed_token_ids", len(body.allowed_token_ids), limits.max_logit_bias, "max_logit_bias"),
            ("logit_bias", len(body.logit_bias), limits.max_logit_bias, "max_logit_bias"),
            (logprobs, body.num_logprobs or 0, limits.max_top_logprobs, "max_top_logprobs"),
        ]
    for param, number, maximum, setting in counts:
        if number > maximum:
            verb, unit = ("is", "") if param in ("n", "logprobs", "top_logprobs") else ("has", " entries")
            message = f"{param} {verb} {number}{unit}; accepted: at most {maximum} (limits.{setting})"
            yield RefusalError(message, code="invalid_value", param=param)


def _follows(details: ErrorDetails) -> bool:
    """Whether a fault only follows from others: a list whose items are all bad counts as empty."""
    return details["type"] == "too_short" and bool(details["input"])


def _fault(details: ErrorDetails, model: type[BodyModel]) -> RefusalError:
    """A fault that pydantic found, as parameter path, value and what is accepted."""
    context: Mapping[str, object] = details.get("ctx", {})
    location = tuple(part for part in details["loc"] if not _is_union_tag(part))
    if "at" in context:
        at = context["at"]
        location = (*location, at if isinstance(at, int) else str(at))
    param = responses_name(_path(location)) if model is ResponsesChat else _path(location)
    if details["type"] == "extra_forbidden":
        return _unknown(param, str(location[-1]), model if len(location) == 1 else None)
    if details["type"] == "missing":
        return RefusalError(f"{param} is missing", code="missing_parameter", param=param)
    value = context["value"] if "value" in context else shorten(_value_at(details, context))
    return RefusalError(f"{param} is {value}; accepted: {_accepted(details)}", code=_code(details["type"]), param=param)


def _value_at(details: ErrorDetails, context: Mapping[str, object]) -> object:
    value, at = details["input"], context.get("at")
    if isinstance(value, dict) and isinstance(at, str):
        return value.get(at)
    if isinstance(value, list | tuple) and isinstance(at, int):
        return value[at]
    return getattr(value, at, None) if isinstance(value, BodyModel) and isinstance(at, str) else value


def _unknown(param: str, name: str, model: type[BodyModel] | None) -> RefusalError:
    meant = _meant(name, model) if model else None
    hint = f"; did you mean {meant}?" if meant else ""
    return RefusalError(f"unknown parameter {shorten(param)}{hint}", code="unknown_parameter", param=param)


def _meant(name: str, model: type[BodyModel]) -> str | None:
    """The parameter that a name is likely to stand for; None where none is near."""
    near = difflib.get_close_matches(name, model.model_fields, n=1, cutoff=_LIKELY)
    return next((other for other in (*_OTHER_NAMES.get(name, ()), *near) if other in model.model_fields), None)


def _accepted(details: ErrorDetails) -> str:
    return _ACCEPTED.get(details["type"]) or details["msg"].removeprefix(_PREFIX)


def _code(error_type: str) -> str:
    if error_type in _OWN_CODES:
        return error_type
    return "invalid_type" if error_type.endswith(("_type", "_required")) else "invalid_value"


def _is_union_tag(part: int | str) -> bool:
    return isinstance(part, str) and part.startswith("<") and part.endswith(">")


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path
