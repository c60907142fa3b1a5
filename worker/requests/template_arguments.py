"""The variables of a chat template that a request sets."""

from __future__ import annotations

from engine.errors import InvalidRequest
from engine.text.chat_template import RESERVED, ChatTemplate
from worker.lines.chat_body import ChatBody

_THINKING = "enable_thinking"  # how Qwen3's templates, and many since, call the switch
_EFFORT = "reasoning_effort"


def template_arguments(template: ChatTemplate, body: ChatBody) -> dict[str, object]:
    """`chat_template_kwargs`, and `reasoning_effort` as the template calls it.

    An effort is the template's variable of that name; where there is none, but one that switches thinking, none is off.
    Raises InvalidRequest for what the template would ignore.
    """
    with_tools = bool(body.offered_tools)
    arguments = dict(body.chat_template_kwargs)
    for name, value in arguments.items():
        if name in RESERVED or not template.reads(name, with_tools=with_tools):
            why = "the request itself sets" if name in RESERVED else "this model's chat template does not read"
            raise InvalidRequest(
                f"chat_template_kwargs has {name!r}, which {why}; accepted: other names",
                param=f"chat_template_kwargs.{name}",
                value=value,
            )
    if body.reasoning_effort is not None:
        name, value = _effort(template, body.reasoning_effort, with_tools=with_tools)
        if name in arguments:
            raise _refuse(body.reasoning_effort, f"chat_template_kwargs sets {name} too", "one of them")
        arguments[name] = value
    return arguments


def _effort(template: ChatTemplate, effort: str, *, with_tools: bool) -> tuple[str, object]:
    if template.reads(_EFFORT, with_tools=with_tools):
        return _EFFORT, effort
    if not template.reads(_THINKING, with_tools=with_tools):
        raise _refuse(effort, "this model's chat template reads no such thing", "a line without it")
    if effort != "none":
        why = "this model's chat template only switches thinking on and off"
        raise _refuse(effort, why, f"none, or a line without it, or chat_template_kwargs.{_THINKING}")
    return _THINKING, False


def _refuse(effort: str, why: str, accepted: str) -> InvalidRequest:
    return InvalidRequest(
        f"{_EFFORT} is {effort!r}, but {why}; accepted: {accepted}", param=_EFFORT, value=effort, accepted=accepted
    )
