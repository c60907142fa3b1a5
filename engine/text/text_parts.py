"""Whether a chat template reads content that is a list of parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.errors import InvalidRequest

_FIRST, _SECOND = "first-part", "second-part"


def takes_parts(run: Callable[[Mapping[str, object]], str], variables: Mapping[str, object]) -> bool:
    """Whether the template behind `run` (variables to prompt) writes both texts of two parts, and not the list itself.

    `variables`: what it reads beside the conversation. Tried, not read off the source: templates reach the parts
    through macros, filters and variables of their own.
    """
    content = [{"type": "text", "text": _FIRST}, {"type": "text", "text": _SECOND}]
    messages = [{"role": "user", "content": content}]
    try:
        prompt = run({**variables, "messages": messages, "tools": None, "add_generation_prompt": False})
    except InvalidRequest:
        return False
    _, first, behind = prompt.partition(_FIRST)
    between, second, _ = behind.partition(_SECOND)
    return bool(first and second) and "type" not in between  # as Python or JSON writes the list
