"""A chat answer in its parts."""

from __future__ import annotations

from dataclasses import dataclass

from worker.answers.called_tool import CalledTool


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """What a message holds. An answer without calls and reasoning is its content."""

    content: str | None  # None: nothing but calls
    calls: tuple[CalledTool, ...] = ()
    reasoning: str | None = None  # None: there was none
    num_reasoning_tokens: int | None = None  # its tokens, its marks included; None: this model's are not told apart
