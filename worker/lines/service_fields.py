"""What a request may tell the service that has no effect on a batch's answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from worker.lines.body_model import BodyModel


class ServiceFields(BodyModel):
    """OpenAI's fields about the request, not about its answer: accepted in the form OpenAI accepts, and of no effect.

    This is the whole list. A parameter that would change the answer and is not carried out is refused by name, see
    `unsupported`.
    """

    user: str | None = None
    safety_identifier: str | None = None
    metadata: Mapping[str, str] | None = None
    store: bool | None = None  # results stay in Redis for redis.result_ttl_s either way
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None  # there is one tier
    # Prefixes are cached for every request, and wherever they are equal.
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    # Text the answer is likely to repeat: OpenAI answers faster, not differently.
    prediction: Mapping[str, object] | None = None
