"""Renders conversations to prompts by one model's chat template, with the variables that a request sets."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from engine.errors import InvalidRequest
from engine.text.chat_template import RESERVED, ChatTemplate
from worker.lines.chat import ChatBody, ChatMessage
from worker.records.answers import REASONING_BEGIN, REASONING_END, AnswerFormats

_ANY_TIME = datetime.fromtimestamp(0, UTC)  # for a trial: no template's prompt ends in a date
_MAX_REMEMBERED = 64  # different chat_template_kwargs; a job has one or two

_THINKING = "enable_thinking"  # how Qwen3's templates, and many since, call the switch
_EFFORT = "reasoning_effort"


class ChatPrompts:
    """What the model is shown of a conversation, and what is known of its answer before it begins."""

    def __init__(self, template: ChatTemplate | None, formats: AnswerFormats) -> None:
        """`formats`: the operator's choice; what is `auto` is read off the template."""
        self._template = template
        self.formats = formats if template is None else formats.for_template(template.writes)
        self._ends: dict[str, str] = {}

    def text(self, body: ChatBody, created_s: int) -> str:
        """The prompt. The template takes the job's `created_s` (Unix time) for now, so that a later run has the same.

        Raises InvalidRequest where the model has no template, or one that refuses the conversation, does not read a
        template argument, or shows no tools.
        """
        template = self._template
        if template is None:
            raise InvalidRequest(
                "messages need a chat template, which this model does not have; accepted: a prompt", param="messages"
            )
        arguments = template_arguments(template, body)
        tools = [tool.as_given() for tool in body.offered_tools]
        if tools:
            self._check_tools(template)
        return template.render(
            [self._message(template, message, with_tools=bool(tools)) for message in body.messages],
            datetime.fromtimestamp(created_s, UTC),
            tools=tools or None,
            add_generation_prompt=True,
            **arguments,
        )

    def reasons_first(self, body: ChatBody) -> bool:
        """Whether a model of these formats does not answer right behind the prompt: a channel's name is due there,
        reasoning is open, or may be begun since the template's switch for it is not off.
        """
        if self.formats.is_harmony or self._template is None or self.formats.reasoning == "none":
            return self.formats.is_harmony
        has_switch = self._template.reads(_THINKING, with_tools=bool(body.offered_tools))
        return self._end_of_prompt(body) in ((REASONING_BEGIN, "") if has_switch else (REASONING_BEGIN,))

    def opens_reasoning(self, body: ChatBody) -> bool:
        """Whether prompts end with `<think>`, so that answers begin inside."""
        return self._end_of_prompt(body) == REASONING_BEGIN

    def _end_of_prompt(self, body: ChatBody) -> str:
        """The mark of reasoning, if any, that prompts end with: tried with a conversation of one word."""
        if self._template is None or self.formats.reasoning == "none":
            return ""
        arguments = template_arguments(self._template, body)
        tools = [tool.as_given() for tool in body.offered_tools[:1]] or None
        key = json.dumps([arguments, tools is not None], sort_keys=True)
        end = self._ends.get(key)
        if end is None:
            end = self._tried(self._template, tools, arguments)
            if len(self._ends) >= _MAX_REMEMBERED:
                self._ends.clear()
            self._ends[key] = end
        return end

    def _tried(
        self, template: ChatTemplate, tools: list[dict[str, object]] | None, arguments: dict[str, object]
    ) -> str:
        try:
            question = [{"role": "user", "content": "x"}]
            prompt = template.render(question, _ANY_TIME, tools=tools, add_generation_prompt=True, **arguments)
        except InvalidRequest:
            return ""
        return next((mark for mark in (REASONING_BEGIN, REASONING_END) if prompt.rstrip().endswith(mark)), "")

    def _check_tools(self, template: ChatTemplate) -> None:
        if not template.reads("tools", with_tools=True):
            fault = "are of no use to this model: its chat template does not show them; accepted: a line without"
        elif self.formats.tool_calls == "auto":
            fault = (
                "need a known format of tool calls, which this model's chat template does not show; accepted: "
                "a line without, or model.tool_call_format set (none: calls stay text)"
            )
        else:
            return
        raise InvalidRequest(f"tools {fault}", param="tools")

    def _message(self, template: ChatTemplate, message: ChatMessage, *, with_tools: bool) -> dict[str, object]:
        # OpenAI's new word for system. Qwen3's template would leave it out, Llama 3's write a role nobody trained.
        is_system = message.role == "developer" and not template.knows_role("developer", with_tools=with_tools)
        role = "system" if is_system else message.role
        return {
            **message.for_template(keep_parts=template.takes_parts(with_tools=with_tools, role=role)),
            "role": role,
        }


def template_arguments(template: ChatTemplate, body: ChatBody) -> dict[str, object]:
    """`chat_template_kwargs`, and `reasoning_effort` as the template calls it.

    Where the template has no such variable, but a switch for thinking, the effort `none` turns that off. Raises
    InvalidRequest for what the template would ignore.
    """
    with_tools = bool(body.offered_tools)
    arguments = dict(body.chat_template_kwargs)
    for name in arguments:
        if name in RESERVED or not template.reads(name, with_tools=with_tools):
            why = "the request itself sets" if name in RESERVED else "this model's chat template does not read"
            raise InvalidRequest(
                f"chat_template_kwargs has {name!r}, which {why}; accepted: other names",
                param=f"chat_template_kwargs.{name}",
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
    return InvalidRequest(f"{_EFFORT} is {effort!r}, but {why}; accepted: {accepted}", param=_EFFORT)
