"""Bounds that the operator sets, as against those that the API has."""

from __future__ import annotations

from settings import LimitSettings
from worker.lines.chat_body import ChatBody
from worker.lines.embedding_body import EmbeddingBody
from worker.lines.refusal_error import RefusalError
from worker.lines.request_line import GeneratingBody, RequestBody


def check_limits(body: RequestBody, limits: LimitSettings) -> None:
    """Refuse what costs memory or time out of proportion to the line's size. Raises RefusalError."""
    if isinstance(body, EmbeddingBody):
        _check("input", len(body.input), limits.max_embedding_inputs, "max_embedding_inputs")
    else:
        _check_generating(body, limits)


def _check_generating(body: GeneratingBody, limits: LimitSettings) -> None:
    logprobs = "top_logprobs" if isinstance(body, ChatBody) else "logprobs"
    for param, number, maximum, setting in (
        ("tools", len(body.tools) if isinstance(body, ChatBody) else 0, limits.max_tools, "max_tools"),
        ("n", body.n, limits.max_n, "max_n"),
        ("stop", len(body.stop), limits.max_stop, "max_stop"),
        ("stop_token_ids", len(body.stop_token_ids), limits.max_logit_bias, "max_logit_bias"),
        ("logit_bias", len(body.logit_bias), limits.max_logit_bias, "max_logit_bias"),
        (logprobs, body.num_logprobs or 0, limits.max_top_logprobs, "max_top_logprobs"),
    ):
        _check(param, number, maximum, setting)


def _check(param: str, number: int, maximum: int, setting: str) -> None:
    if number > maximum:
        verb, unit = ("is", "") if param in ("n", "logprobs", "top_logprobs") else ("has", " entries")
        raise RefusalError(
            f"{param} {verb} {number}{unit}; accepted: at most {maximum} (limits.{setting})",
            code="invalid_value",
            param=param,
        )
