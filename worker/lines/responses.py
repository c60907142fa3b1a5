"""Checks the body of /v1/responses, and turns it into the conversation that it is: no answer has a second path.

What an answer would need and is not carried out is refused by name: another item than messages, calls, their outputs
and reasoning, another tool than functions, a state kept on the server.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Strict, Tag, model_validator
from pydantic_core import PydanticCustomError

from worker.lines.chat import ChatBody, Effort, FunctionName, arguments_object
from worker.lines.fields import BodyModel
from worker.lines.strict_json import shorten

# What comes back in an item that was an answer before, and changes nothing.
_Status = Literal["in_progress", "completed", "incomplete"]
_Empty = Annotated[tuple[()], Strict(False)]
_Ignored = Annotated[tuple[object, ...], Strict(False)]  # log-probabilities of an earlier answer


def _kind(value: object, default: str = "") -> str | None:
    kind = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", default)
    return f"<{kind}>"


def _by_type(accepted: str) -> Discriminator:
    return Discriminator(
        _kind,
        custom_error_type="invalid_value",
        custom_error_message=accepted,
        custom_error_context={"at": "type"},
    )


class InputText(BodyModel):
    """A text that was given."""

    type: Literal["input_text"]
    text: str

    @property
    def part(self) -> dict[str, object]:
        """As chat has it."""
        return {"type": "text", "text": self.text}


class OutputText(BodyModel):
    """A text of an earlier answer."""

    type: Literal["output_text"]
    text: str
    annotations: _Empty = ()
    logprobs: _Ignored = ()

    @property
    def part(self) -> dict[str, object]:
        """As chat has it."""
        return {"type": "text", "text": self.text}


class RefusalText(BodyModel):
    """A refusal of an earlier answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def part(self) -> dict[str, object]:
        """As chat has it."""
        return {"type": "refusal", "refusal": self.refusal}


_InputPart = Annotated[Annotated[InputText, Tag("<input_text>")], _by_type("'input_text'")]
_Part = Annotated[
    Annotated[InputText, Tag("<input_text>")]
    | Annotated[OutputText, Tag("<output_text>")]
    | Annotated[RefusalText, Tag("<refusal>")],
    _by_type("'input_text', or of an assistant 'output_text' or 'refusal'"),
]


def _text_or_parts(value: object) -> object:
    if not isinstance(value, str | list):
        raise PydanticCustomError("invalid_type", "a string or a list of text parts")
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


class MessageItem(BodyModel):
    """What somebody said."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[tuple[_Part, ...], Strict(False), BeforeValidator(_text_or_parts)]
    id: str | None = None
    status: _Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        for position, part in enumerate(self.content):
            if self.role != "assistant" and part.type != "input_text":
                at = {"at": f"content[{position}].type", "value": shorten(part.type)}
                raise PydanticCustomError("invalid_value", "'input_text', or an assistant's own", at)
        return self


class CallItem(BodyModel):
    """A function that the assistant called."""

    type: Literal["function_call"]
    call_id: str
    name: Annotated[str, Field(min_length=1)]
    arguments: Annotated[Mapping[str, object], BeforeValidator(arguments_object)]
    id: str | None = None
    status: _Status | None = None


class CallOutputItem(BodyModel):
    """What such a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: Annotated[tuple[_InputPart, ...], Strict(False), BeforeValidator(_text_or_parts)]
    id: str | None = None
    status: _Status | None = None


class ReasoningText(BodyModel):
    """A part of reasoning, or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(BodyModel):
    """What the assistant thought before it went on."""

    type: Literal["reasoning"]
    summary: Annotated[tuple[ReasoningText, ...], Strict(False)] = ()
    content: Annotated[tuple[ReasoningText, ...], Strict(False)] = ()
    encrypted_content: None = None  # only who sealed it can read it
    id: str | None = None
    status: _Status | None = None

    @property
    def text(self) -> str:
        """The reasoning itself; its summary where there is nothing else."""
        return "\n".join(part.text for part in self.content or self.summary)


_Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[CallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(
        lambda value: _kind(value, "message"),
        custom_error_type="invalid_value",
        custom_error_message="'message', 'function_call', 'function_call_output' or 'reasoning'",
        custom_error_context={"at": "type"},
    ),
]


def _text_or_items(value: object) -> object:
    if not isinstance(value, str | list):
        raise PydanticCustomError("invalid_type", "a string or a list of items")
    if not value:
        raise PydanticCustomError("empty_prompt", "an input that is not empty")
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class TextFormat(BodyModel):
    """What an answer is held to. A schema stands beside the type, where chat has it in an object of its own."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_object: Annotated[Mapping[str, object] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_a_schema_or_none(self) -> Self:
        given = {
            "schema": self.schema_object,
            "name": self.name,
            "description": self.description,
            "strict": self.strict,
        }
        for name, value in given.items():
            if self.type != "json_schema" and value is not None:
                raise PydanticCustomError("invalid_value", "only with type json_schema", {"at": name, "value": "set"})
        return self


class TextOptions(BodyModel):
    """How the answer's text is to be."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(BodyModel):
    """How much the model is to think. Reasoning comes back as it is, so nothing is summed up."""

    effort: Effort | None = None
    summary: None = None
    generate_summary: None = None


class FunctionTool(BodyModel):
    """A function on offer. Unlike OpenAI's service, its arguments are held to the schema only with `strict` true."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: Mapping[str, object] | None = None
    strict: bool | None = None


class NamedTool(BodyModel):
    """A function that is to be called."""

    type: Literal["function"]
    name: FunctionName


def _choice_kind(value: object) -> str:
    return "<named>" if isinstance(value, dict | NamedTool) else "<mode>"


class ResponsesBody(BodyModel):
    """The body as OpenAI's Responses API has it, less what would need a state on the server."""

    input: Annotated[tuple[_Item, ...], Strict(False), BeforeValidator(_text_or_items)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[tuple[FunctionTool, ...], Strict(False)] = ()
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("<mode>")] | Annotated[NamedTool, Tag("<named>")],
            Discriminator(_choice_kind),
        ]
        | None
    ) = None
    parallel_tool_calls: bool = True
    # What asks for nothing, or is about the request and not about its answer; see ServiceFields.
    truncation: Literal["disabled"] | None = None
    include: _Empty = ()
    top_logprobs: Literal[0] | None = None
    previous_response_id: None = None
    conversation: None = None
    max_tool_calls: None = None
    user: str | None = None
    safety_identifier: str | None = None
    metadata: Mapping[str, str] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None

    def as_chat(self, given: Mapping[str, object]) -> dict[str, object]:
        """The body of a chat that asks for the same. `given`: this body as the line has it: the answer repeats it."""
        chat: dict[str, object] = {
            "asked": given,
            "messages": _messages(self.instructions, self.input),
            "model": self.model,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "parallel_tool_calls": self.parallel_tool_calls,
            "tools": [_tool(tool) for tool in self.tools],
            "response_format": None if self.text is None or self.text.format is None else _format(self.text.format),
        }
        if isinstance(self.tool_choice, NamedTool):
            chat["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        elif self.tools or self.tool_choice != "auto":  # what a response says where there were none
            chat["tool_choice"] = self.tool_choice
        return chat


class ResponsesChat(ChatBody):
    """A conversation that came as the body of /v1/responses, and is answered so."""

    asked: Mapping[str, object]


def _given(fields: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}


def _tool(tool: FunctionTool) -> dict[str, object]:
    fields = {"name": tool.name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    return {"type": "function", "function": _given(fields)}


def _format(asked: TextFormat) -> dict[str, object]:
    fields = {"name": asked.name, "description": asked.description, "strict": asked.strict}
    schema = _given({**fields, "schema": asked.schema_object})
    return {"type": asked.type, **({"json_schema": schema} if asked.type == "json_schema" else {})}


def _messages(instructions: str | None, items: Sequence[BodyModel]) -> list[dict[str, Any]]:
    """The conversation: what an assistant thought, said and called between two others' turns is one message of its."""
    messages: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    for item in items:
        if isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": _content(item.content)})
        elif isinstance(item, CallOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)})
        elif isinstance(item, MessageItem):
            _assistant(messages, before=("content", "tool_calls"))["content"] = _content(item.content)
        elif isinstance(item, ReasoningItem):
            if item.text:
                before = ("reasoning_content", "content", "tool_calls")
                _assistant(messages, before)["reasoning_content"] = item.text
        elif isinstance(item, CallItem):
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            _assistant(messages, before=()).setdefault("tool_calls", []).append(call)
    return messages


def _assistant(messages: list[dict[str, Any]], before: Sequence[str]) -> dict[str, Any]:
    """The assistant's message that goes on; a new one if another spoke, or it has one of what comes after."""
    if not messages or messages[-1]["role"] != "assistant" or any(name in messages[-1] for name in before):
        messages.append({"role": "assistant"})
    return messages[-1]


def _content(parts: Sequence[InputText | OutputText | RefusalText]) -> object:
    """One text as such, which every template takes."""
    found = [part.part for part in parts]
    return found[0]["text"] if len(found) == 1 and found[0]["type"] == "text" else found


_OF_CHAT = (
    (re.compile(r"^messages(\[[0-9]+\])?"), "input"),
    (re.compile(r"^max_(completion_)?tokens"), "max_output_tokens"),
    (re.compile(r"^response_format(\.json_schema)?"), "text.format"),
    (re.compile(r"^(tools\[[0-9]+\]|tool_choice)\.function"), r"\1"),
    (re.compile(r"^reasoning_effort"), "reasoning.effort"),
)


def responses_name(param: str) -> str:
    """What /v1/responses calls a parameter of chat; a message that begins with one likewise."""
    for pattern, name in _OF_CHAT:
        param = pattern.sub(name, param)
    return param
