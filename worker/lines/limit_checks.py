"""Bounds that the operator sets, as against those that the API has."""

from __future__ import annotations

from settings import LimitSettings
from worker.lines.chat_body import ChatBody
from worker.lines.refusal_error import RefusalError
from worker.lines.request_line import RequestBody


def check_limits(body: RequestBody, limits: LimitSettings) -> None:
    """Refuse what costs memory or time out of proportion to the line's size. Raises RefusalError."""
    logprobs = "top_logprobs" if isinstance(body, ChatBody) else "logprobs"
    for param, number, maximum, setting in (
        ("n", body.n, limits.max_n, "max_n"),
        ("stop", len(body.stop), limits.max_stop, "max_stop"),
        ("stop_token_ids", len(body.stop_token_ids), limits.max_logit_bias, "max_logit_bias"),
        ("logit_bias", len(body.logit_bias), limits.max_logit_bias, "max_logit_bias"),
        (logprobs, body.num_logprobs or 0, limits.max_top_logprobs, "max_top_logprobs"),
    ):
        if number > maximum:
            verb, unit = ("is", "") if param in ("n", logprobs) else ("has", " entries")
            raise RefusalError(
                f"{param} {verb} {number}{unit}; accepted: at most {maximum} (limits.{setting})",
                code="invalid_value",
                param=param,
            )
