"""The endpoints a request line may name."""

from __future__ import annotations

from enum import StrEnum


class Endpoint(StrEnum):
    """What a request asks for. Values are OpenAI's paths, as `url` spells them."""

    CHAT_COMPLETIONS = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    EMBEDDINGS = "/v1/embeddings"
