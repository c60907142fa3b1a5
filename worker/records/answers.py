"""Takes a finished answer apart into reasoning, tool calls and text, in the formats that model families write."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from settings import ReasoningFormat, ToolCallFormat
from worker.lines.strict_json import has_surrogate

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
REASONING_BEGIN, REASONING_END = "<think>", "</think>"

# Other models put XML between the same marks; their templates hold one of these.
_OTHER_CALLS = ("<function=", "<arg_key>")

_ARGUMENTS = ("arguments", "parameters")  # Qwen3's word, Llama 3's word
_SPACE = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """The formats of one model.

    tool_calls: qwen3 is one JSON object (`name`, `arguments`) between `<tool_call>` and `</tool_call>` for each call,
    also known as Hermes; llama3 is an answer that is such an object (`name`, `parameters`), also behind
    `<|python_tag|>`; none leaves calls in the text. reasoning: qwen3 is `<think>` ... `</think>` before the answer.
    """

    tool_calls: ToolCallFormat = "auto"
    reasoning: ReasoningFormat = "auto"

    def for_template(self, writes: Callable[[str], bool]) -> AnswerFormats:
        """With `auto` replaced by what the model's chat template writes itself; `writes` says whether it has a text.

        tool_calls stays `auto` where the template shows no format that is known here.
        """
        tool_calls, reasoning = self.tool_calls, self.reasoning
        if tool_calls == "auto":
            if writes(CALL_BEGIN) and not any(map(writes, _OTHER_CALLS)):
                tool_calls = "qwen3"
            elif writes("<|start_header_id|>") and writes('"parameters"'):
                tool_calls = "llama3"
        if reasoning == "auto":
            reasoning = "qwen3" if writes(REASONING_END) else "none"
        return AnswerFormats(tool_calls, reasoning)

    @property
    def marks(self) -> frozenset[str]:
        """The texts by which parts are told apart. Some tokenizers have special tokens for them."""
        calls = {"qwen3": {CALL_BEGIN, CALL_END}, "llama3": {PYTHON_TAG}}.get(self.tool_calls, set())
        return frozenset(calls | ({REASONING_BEGIN, REASONING_END} if self.reasoning == "qwen3" else set()))


@dataclass(frozen=True, slots=True)
class CalledTool:
    """Which function, and with what."""

    name: str  # one that the request offered
    arguments: str  # a JSON object, as the model spelled it


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """What a message holds. An answer without calls and reasoning is its content."""

    content: str | None  # None: nothing but calls
    calls: tuple[CalledTool, ...] = ()
    reasoning: str | None = None  # None: there was none
    num_reasoning_tokens: int | None = None  # its tokens, its marks included; None: this model's are not told apart


def split_reasoning(text: str, *, opened: bool) -> tuple[str, int] | None:
    """The reasoning at the beginning of `text` and where the answer behind it begins; None if there is none.

    `opened`: the prompt ended with `<think>`, so the text begins inside. Reasoning that was not closed, because the
    answer was cut, is all of the text. Line ends around it belong to the format, which writes them again.
    """
    begin = len(text) - len(text.lstrip())
    if text.startswith(REASONING_BEGIN, begin):
        begin += len(REASONING_BEGIN)
    elif opened:
        begin = 0
    else:
        return None
    end = text.find(REASONING_END, begin)
    if end < 0:
        return text[begin:].strip("\n"), len(text)
    return text[begin:end].strip("\n"), end + len(REASONING_END)


Read = tuple[tuple[CalledTool, ...], str]  # the calls, and the text outside them


def read_calls(text: str, formats: AnswerFormats, names: Collection[str]) -> Read | None:
    """The calls in `text` of the functions `names`; None if it holds none, or one that cannot be read.

    All or nothing: a caller who is told of one call of two would act on half an answer. Never raises.
    """
    if formats.tool_calls == "qwen3":
        return _marked(text, names)
    return _bare(text, names) if formats.tool_calls == "llama3" else None


def _marked(text: str, names: Collection[str]) -> Read | None:
    """Qwen3's calls. The last end mark may be missing: some models end the answer in its place."""
    calls: list[CalledTool] = []
    beside: list[str] = []
    position = 0
    while (begin := text.find(CALL_BEGIN, position)) >= 0:
        beside.append(text[position:begin])
        found = read_call(text, after_space(text, begin + len(CALL_BEGIN)), names)
        if found is None:
            return None
        call, end = found
        calls.append(call)
        position = after_space(text, end)
        if text.startswith(CALL_END, position):
            position += len(CALL_END)
        elif position < len(text):
            return None
    beside.append(text[position:])
    return (tuple(calls), "".join(beside).strip()) if calls else None


def _bare(text: str, names: Collection[str]) -> Read | None:
    """Llama 3's calls: the whole answer, or all that follows the tag. A `;` may stand between two calls."""
    before, tag, behind = text.partition(PYTHON_TAG)
    if not tag:
        before, behind = "", text
    calls: list[CalledTool] = []
    position = after_space(behind, 0)
    while position < len(behind):
        found = read_call(behind, position, names)
        if found is None:
            return None
        call, position = found
        calls.append(call)
        position = after_space(behind, position)
        if behind.startswith(";", position):
            position = after_space(behind, position + 1)
    return (tuple(calls), before.strip()) if calls else None


def read_call(text: str, start: int, names: Collection[str]) -> tuple[CalledTool, int] | None:
    """The call whose object begins at `text[start]`, and where it ends; None if there is no call of one of `names`.

    Arguments keep the model's own spelling: written anew, 1e999 would become Infinity, which is no JSON.
    """
    try:
        members, end = _members(text, start)
    except (ValueError, RecursionError):  # no JSON, or nested as no call is
        return None
    name, _ = members.get("name", (None, ""))
    given = [members[key] for key in _ARGUMENTS if key in members]
    if not isinstance(name, str) or name not in names or len(given) != 1:
        return None
    arguments = arguments_text(*given[0])
    return None if arguments is None else (CalledTool(name, arguments), end)


def arguments_text(value: object, spelling: str) -> str | None:
    """The arguments as JSON text: an object, or, as some models write it, a string that holds one; else None.

    None too for a string with half a surrogate pair, which no record can hold: in the text it is still escaped.
    """
    if isinstance(value, str):
        if has_surrogate(value):
            return None
        spelling, value = value, whole_value(value)
    return spelling if isinstance(value, dict) else None


def whole_value(text: str) -> object:
    """The JSON value that `text` is, white space around it aside; None if it is none."""
    try:
        value, end = _decoder().raw_decode(text, after_space(text, 0))
    except (ValueError, RecursionError):
        return None
    return value if after_space(text, end) == len(text) else None


def after_space(text: str, position: int) -> int:
    """The next position that is no JSON white space."""
    match = _SPACE.match(text, position)
    return position if match is None else match.end()


def _members(text: str, start: int) -> tuple[dict[str, tuple[object, str]], int]:
    """Key -> (value, its spelling) of the object at `start`, and where it ends. Raises ValueError, RecursionError."""
    decoder = _decoder()
    found: dict[str, tuple[object, str]] = {}
    position = after_space(text, _expect(text, start, "{"))
    if text.startswith("}", position):
        return found, position + 1
    while True:
        key, position = decoder.raw_decode(text, position)
        if not isinstance(key, str) or key in found:
            raise ValueError("not a key, or a key twice")
        begin = after_space(text, _expect(text, after_space(text, position), ":"))
        value, position = decoder.raw_decode(text, begin)
        found[key] = value, text[begin:position]
        position = after_space(text, position)
        if text.startswith("}", position):
            return found, position + 1
        position = after_space(text, _expect(text, position, ","))


def _expect(text: str, position: int, mark: str) -> int:
    if not text.startswith(mark, position):
        raise ValueError(f"no {mark}")
    return position + 1


def _decoder() -> json.JSONDecoder:
    return json.JSONDecoder(parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")
