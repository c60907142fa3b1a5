"""Parses raw bytes to a RequestLine, or raises a LineError that says what is wrong.

It also turns pydantic's errors into ours, refuses known parameters of OpenAI's and vLLM's that are not carried out,
unless they ask for nothing, and checks the operator's limits.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from settings import LimitSettings
from worker.lines.bodies import CompletionBody, EmbeddingBody
from worker.lines.chat import ChatBody
from worker.lines.errors import LineError, RefusalError
from worker.lines.fields import BodyModel
from worker.lines.request_line import Endpoint, RequestBody, RequestLine
from worker.lines.strict_json import has_surrogate, read_strict_json, shorten

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

# Parameter -> the values that ask for nothing, which are accepted. Any other is refused by name, since a result that
# ignored it would not be what the line asked for.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "stream": (False,),
    "modalities": (["text"],),
    "best_of": (1,),
    "suffix": ("",),
    # Tools are carried out for conversations; their forms of 2023 would need answers of 2023.
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("none",),
    "verbosity": ("medium",),
}
_REFUSED = frozenset(
    {
        "stream_options", "reasoning_effort",
        "audio", "web_search_options", "guided_decoding_backend", "guided_whitespace_pattern",
        "use_beam_search", "length_penalty", "early_stopping", "prompt_logprobs",
        "truncate_prompt_tokens", "chat_template", "add_generation_prompt", "continue_final_message",
        "add_special_tokens", "skip_special_tokens", "spaces_between_special_tokens",
        "include_stop_str_in_output", "bad_words", "allowed_token_ids", "logits_processors",
        "prompt_embeds", "documents",
    }
)  # fmt: skip
_KNOWN = _REFUSED | _NEUTRAL.keys()
# Parameters of one endpoint: the others do not know the first, and ChatBody checks the second itself.
_OF_COMPLETIONS = frozenset({"best_of", "suffix"})
_OF_CHAT = frozenset({"tools", "tool_choice", "parallel_tool_calls", "reasoning_effort"})

_PREFIX = "Input should be "
_ACCEPTED = {
    "int_type": "a whole number",
    "float_type": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "string_too_short": "a string that is not empty",
    "tuple_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "mapping_type": "an object",
    "none_required": "null",
    "too_long": "an empty list",
}
_OWN_CODES = frozenset({"invalid_type", "invalid_value", "empty_prompt"})


def parse_request_line(raw: bytes | None, index: int, limits: LimitSettings) -> RequestLine:
    """Parse line `index` (0-based) of a job, blank lines not counted: an OpenAI Batch line, or a body alone.

    A body alone may carry a custom_id beside its parameters; without one it is line-<n>, n counting from 1. `raw` is
    None for a line that is not in Redis any more. Raises LineError, whatever the bytes are.
    """
    if raw is None:
        raise LineError("the line is missing from the job's input", code="missing_line", index=index)
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
    raise RefusalError(f"custom_id {fault}", code=code, param="custom_id")


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


def without_neutral(body: Mapping[str, object], endpoint: Endpoint) -> Mapping[str, object]:
    """`body` less the parameters that are present but ask for nothing. Raises RefusalError for others."""
    if _KNOWN.isdisjoint(body):  # nearly every line
        return body
    kept: dict[str, object] = {}
    left_to_body = _OF_CHAT if endpoint is Endpoint.CHAT_COMPLETIONS else frozenset[str]()
    if endpoint is not Endpoint.COMPLETIONS:
        left_to_body |= _OF_COMPLETIONS
    for name, value in body.items():
        if name not in _KNOWN or name in left_to_body:
            kept[name] = value
        elif value is not None and not _is_neutral(name, value):
            accepted = " or ".join(map(shorten, _NEUTRAL[name])) if name in _NEUTRAL else "a line without it"
            raise RefusalError(
                f"{name} is {shorten(value)}, which is not supported; accepted: {accepted}",
                code="unsupported_parameter",
                param=name,
            )
    return kept


def _is_neutral(name: str, value: object) -> bool:
    # 0 is not false, 1 is not true
    return any(type(value) is type(neutral) and value == neutral for neutral in _NEUTRAL.get(name, ()))


def check_limits(body: RequestBody, limits: LimitSettings) -> None:
    """Refuse what costs memory or time out of proportion to the line's size. Raises RefusalError."""
    if isinstance(body, EmbeddingBody):
        counts = [("input", len(body.input), limits.max_embedding_inputs, "max_embedding_inputs")]
    else:
        logprobs, tools = ("top_logprobs", body.tools) if isinstance(body, ChatBody) else ("logprobs", ())
        counts = [
            ("tools", len(tools), limits.max_tools, "max_tools"),
            ("n", body.n, limits.max_n, "max_n"),
            ("stop", len(body.stop), limits.max_stop, "max_stop"),
            ("stop_token_ids", len(body.stop_token_ids), limits.max_logit_bias, "max_logit_bias"),
            ("logit_bias", len(body.logit_bias), limits.max_logit_bias, "max_logit_bias"),
            (logprobs, body.num_logprobs or 0, limits.max_top_logprobs, "max_top_logprobs"),
        ]
    for param, number, maximum, setting in counts:
        if number > maximum:
            verb, unit = ("is", "") if param in ("n", "logprobs", "top_logprobs") else ("has", " entries")
            message = f"{param} {verb} {number}{unit}; accepted: at most {maximum} (limits.{setting})"
            raise RefusalError(message, code="invalid_value", param=param)


def refusal_of_pydantic(error: ValidationError, model: type[BodyModel]) -> RefusalError:
    """The first fault that pydantic found, as parameter path, value and what is accepted."""
    details = error.errors(include_url=False)
    first = details[0]
    context: Mapping[str, object] = first.get("ctx", {})
    location = tuple(part for part in first["loc"] if not _is_union_tag(part))
    if "at" in context:
        at = context["at"]
        location = (*location, at if isinstance(at, int) else str(at))
    param = _path(location)
    if first["type"] == "extra_forbidden":
        return _unknown(param, str(location[-1]), model if len(location) == 1 else None)
    if first["type"] == "missing":
        return RefusalError(f"{param} is missing", code="missing_parameter", param=param)
    value = context.get("value", shorten(_value_at(first, context)))
    return RefusalError(f"{param} is {value}; accepted: {_accepted(first)}", code=_code(first["type"]), param=param)


def _value_at(details: ErrorDetails, context: Mapping[str, object]) -> object:
    value, at = details["input"], context.get("at")
    if isinstance(value, dict) and isinstance(at, str):
        return value.get(at)
    if isinstance(value, list | tuple) and isinstance(at, int):
        return value[at]
    return getattr(value, at, None) if isinstance(value, BodyModel) and isinstance(at, str) else value


def _unknown(param: str, name: str, model: type[BodyModel] | None) -> RefusalError:
    near = difflib.get_close_matches(name, model.model_fields, n=1) if model else []
    hint = f"; did you mean {near[0]}?" if near else ""
    return RefusalError(f"unknown parameter {shorten(param)}{hint}", code="unknown_parameter", param=param)


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
