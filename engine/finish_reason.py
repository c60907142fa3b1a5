"""Why a completion ended."""

from __future__ import annotations

from enum import Enum


class FinishReason(Enum):
    """Why a completion ended. Values are the OpenAI API's where it has one."""

    STOP = "stop"  # an end-of-sequence id, a stop token id or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    CANCELLED = "cancelled"
    ERROR = "error"
