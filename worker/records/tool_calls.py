"""Reads tool calls out of an answer's text, in the formats that model families write."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from settings import ToolCallFormat
from worker.lines.strict_json import has_surrogate
from worker.records.python_calls import read_python_call

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
MISTRAL_CALLS, MISTRAL_ID, MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
LIST_BEGIN, LIST_END = "<|tool_call|>", "<|/tool_call|>"
FUNCTION_BEGIN, FUNCTION_END = "<function=", "</function>"
PARAMETER_BEGIN, PARAMETER_END = "<parameter=", "</parameter>"
PYTHON_BEGIN, PYTHON_END = "<function_calls>", "</function_calls>"

# Marks of special tokens, or text, by which calls are told from other text.
MARKS: Mapping[ToolCallFormat, frozenset[str]] = MappingProxyType(
    {
        "qwen3": frozenset({CALL_BEGIN, CALL_END}),
        "qwen3_coder": frozenset({CALL_BEGIN, CALL_END}),
        "llama3": frozenset({PYTHON_TAG}),
        "pythonic": frozenset({PYTHON_TAG}),
        "olmo3": frozenset({PYTHON_BEGIN, PYTHON_END}),
        "mistral": frozenset({MISTRAL_CALLS}),
        "mistral_v11": frozenset({MISTRAL_CALLS, MISTRAL_ID, MISTRAL_ARGUMENTS}),
        "granite": frozenset({LIST_BEGIN, LIST_END}),
    }
)

_ARGUMENTS = ("arguments", "parameters")  # Llama 3 has the second word, all others the first
_SPACE = re.compile(r"[ \t\n\r]*")
MAX_REFERENCES = 8  # of a schema to another, one behind the other
_NAMED = re.compile(
    f"{re.escape(MISTRAL_CALLS)}\\s*([A-Za-z0-9_-]+)\\s*"
    f"(?:{re.escape(MISTRAL_ID)}[A-Za-z0-9]+)?(?:{re.escape(MISTRAL_ARGUMENTS)})?\\s*"
)
_PARAMETER = re.compile(f"\\s*{PARAMETER_BEGIN}([^>\n]+)>\n?(.*?)\n?{PARAMETER_END}", re.DOTALL)
_TYPES: Mapping[type, str] = MappingProxyType(
    {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array", type(None): "null"}
)


@dataclass(frozen=True, slots=True)
class CalledTool:
    """Which function, and with what."""

    name: str  # one that the request offered
    arguments: str  # a JSON object, as the model spelled it


Read = tuple[tuple[CalledTool, ...], str]  # the calls, and the text outside them
Tools = Mapping[str, Mapping[str, object] | None]  # functions that may be called -> JSON Schema of their arguments


def shown_format(writes: Callable[[str], bool]) -> ToolCallFormat:
    """The format of which a chat template has the marks; `auto` if of none. `writes` says whether it has a text."""
    if writes(MISTRAL_CALLS):
        return "mistral_v11" if writes(MISTRAL_ARGUMENTS) else "mistral"
    if writes(LIST_BEGIN):
        return "granite"
    if writes(CALL_BEGIN) and not writes("<arg_key>"):  # GLM's, between the same marks
        return "qwen3_coder" if writes(FUNCTION_BEGIN) else "qwen3"
    if writes(PYTHON_BEGIN):
        return "olmo3"
    if writes("[func_name1("):  # as Llama's prompts for it tell the model
        return "pythonic"
    return "llama3" if writes("<|start_header_id|>") and writes('"parameters"') else "auto"


def read_calls(text: str, written: ToolCallFormat, tools: Tools) -> Read | None:
    """The calls in `text` of functions among `tools`; None if it holds none, or one that cannot be read.

    All or nothing: a caller who is told of one call of two would act on half an answer. Never raises.
    """
    reader = _READERS.get(written)
    return None if reader is None else reader(text, tools)


def _marked(text: str, tools: Tools) -> Read | None:
    return _between_marks(text, lambda text, start: read_call(text, start, tools))


def _marked_xml(text: str, tools: Tools) -> Read | None:
    return _between_marks(text, lambda text, start: _read_xml(text, start, tools))


def _between_marks(text: str, read: Callable[[str, int], tuple[CalledTool, int] | None]) -> Read | None:
    """Qwen3's calls. The last end mark may be missing: some models end the answer in its place."""
    calls: list[CalledTool] = []
    beside: list[str] = []
    position = 0
    while (begin := text.find(CALL_BEGIN, position)) >= 0:
        beside.append(text[position:begin])
        found = read(text, after_space(text, begin + len(CALL_BEGIN)))
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


def _bare(text: str, tools: Tools) -> Read | None:
    """Llama 3's calls: the whole answer, or all that follows the tag. A `;` may stand between two calls."""
    before, tag, behind = text.partition(PYTHON_TAG)
    if not tag:
        before, behind = "", text
    calls: list[CalledTool] = []
    position = after_space(behind, 0)
    while position < len(behind):
        found = read_call(behind, position, tools)
        if found is None:
            return None
        call, position = found
        calls.append(call)
        position = after_space(behind, position)
        if behind.startswith(";", position):
            position = after_space(behind, position + 1)
    return (tuple(calls), before.strip()) if calls else None


def _python_list(text: str, tools: Tools) -> Read | None:
    """Calls as a list of Python's: the whole answer, or all that follows the tag."""
    before, tag, behind = text.partition(PYTHON_TAG)
    if not tag:
        before, behind = "", text
    found = _python_calls(behind, after_space(behind, 0), ("[", "]"), tools)
    if found is None or after_space(behind, found[1]) < len(behind):
        return None
    return found[0], before.strip()


def _python_lines(text: str, tools: Tools) -> Read | None:
    """OLMo 3's calls: Python's, a line for each, between marks. The end mark may be missing."""
    begin = text.find(PYTHON_BEGIN)
    found = None if begin < 0 else _python_calls(text, begin, (PYTHON_BEGIN, PYTHON_END), tools)
    return None if found is None else (found[0], f"{text[:begin]}{text[found[1] :]}".strip())


def _python_calls(
    text: str, start: int, marks: tuple[str, str], tools: Tools
) -> tuple[tuple[CalledTool, ...], int] | None:
    """The calls between two marks, the first of which is at `start`, and where the second ends; None if none is."""
    begin, end = marks
    if not text.startswith(begin, start):
        return None
    calls: list[CalledTool] = []
    position = after_space(text, start + len(begin))
    while position < len(text) and not text.startswith(end, position):
        try:
            name, arguments, position = read_python_call(text, position)
        except ValueError:
            return None
        if name not in tools:
            return None
        calls.append(CalledTool(name, arguments))
        position = after_space(text, position)
        if text.startswith(",", position):
            position = after_space(text, position + 1)
    is_closed = position < len(text)
    if not calls or not (is_closed or end == PYTHON_END):
        return None
    return tuple(calls), position + len(end) if is_closed else position


def _mistral(text: str, tools: Tools) -> Read | None:
    """Mistral's calls, behind one mark: a list of objects or, since its v11, a name and arguments behind each mark."""
    before, mark, behind = text.partition(MISTRAL_CALLS)
    if not mark:
        return None
    is_list = behind.lstrip().startswith("[")
    calls = _listed(behind, tools) if is_list else _named(mark + behind, tools)
    return None if calls is None else (calls, before.strip())


def _granite(text: str, tools: Tools) -> Read | None:
    """Granite 3's calls: a list of objects behind a mark, Phi-4-mini's before one too."""
    before, mark, behind = text.partition(LIST_BEGIN)
    if not mark:
        before, mark, behind = text.partition(CALL_BEGIN)  # as versions 3.0 to 3.2 may write it
    calls = _listed(behind.removesuffix(LIST_END), tools) if mark else None
    return None if calls is None else (calls, before.strip())


def _listed(text: str, names: Collection[str]) -> tuple[CalledTool, ...] | None:
    """The calls of the JSON list that `text` is; None if it is none, or an empty one."""
    calls: list[CalledTool] = []
    position, opening = after_space(text, 0), "["
    while text.startswith(opening, position):
        found = read_call(text, after_space(text, position + 1), names)
        if found is None:
            return None
        calls.append(found[0])
        position, opening = after_space(text, found[1]), ","
    ends = text.startswith("]", position) and after_space(text, position + 1) == len(text)
    return tuple(calls) if calls and ends else None


def _named(text: str, names: Collection[str]) -> tuple[CalledTool, ...] | None:
    """The calls that `text` is, each of a mark, a name and an object; an id between them is Mistral's own."""
    calls: list[CalledTool] = []
    position = 0
    while position < len(text):
        head = _NAMED.match(text, position)
        if head is None or head[1] not in names:
            return None
        try:
            _, end = _members(text, head.end())
        except (ValueError, RecursionError):
            return None
        calls.append(CalledTool(head[1], text[head.end() : end]))
        position = after_space(text, end)
    return tuple(calls)


def _read_xml(text: str, start: int, tools: Tools) -> tuple[CalledTool, int] | None:
    """The call of Qwen3-Coder that begins at `text[start]`, and where it ends."""
    begin = start + len(FUNCTION_BEGIN)
    end = text.find(">", begin)
    name = text[begin:end]
    if not text.startswith(FUNCTION_BEGIN, start) or end < 0 or name not in tools:
        return None
    spelled: dict[str, str] = {}
    position = end + 1
    while (found := _PARAMETER.match(text, position)) is not None:
        key, value = found[1], found[2]
        if key in spelled or has_surrogate(value):
            return None
        spelled[key] = _spelled(value, argument_types(tools[name], key))
        position = found.end()
    position = after_space(text, position)
    if not text.startswith(FUNCTION_END, position):
        return None
    members = ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in spelled.items())
    return CalledTool(name, f"{{{members}}}"), position + len(FUNCTION_END)


def _spelled(value: str, types: Collection[str]) -> str:
    """`value` as JSON: as it stands where it is JSON of one of the other `types` than a string, else as a string."""
    text = value.strip()
    text = {"True": "true", "False": "false", "None": "null"}.get(text, text)  # as Python has them
    try:
        found, end = _decoder().raw_decode(text)
    except (ValueError, RecursionError):
        found, end = "", -1
    kind = _TYPES[type(found)]
    is_of_types = kind in types or (kind == "integer" and "number" in types)
    return text if end == len(text) and kind != "string" and is_of_types else json.dumps(value, ensure_ascii=False)


def argument_types(schema: Mapping[str, object] | None, key: str) -> frozenset[str]:
    """The JSON types that a function's `schema` allows the argument `key`; none where it does not say."""
    properties = schema.get("properties") if schema else None
    return _types(properties.get(key), schema or {}) if isinstance(properties, Mapping) else frozenset()


def _types(given: object, root: Mapping[str, object]) -> frozenset[str]:
    found = resolved(given, root)
    kinds = found.get("type")
    if isinstance(kinds, str):
        return frozenset({kinds})
    if isinstance(kinds, list):
        return frozenset(kind for kind in kinds if isinstance(kind, str))
    values = [found["const"]] if "const" in found else found.get("enum")
    if isinstance(values, list):
        return frozenset(_TYPES[type(value)] for value in values)
    return frozenset().union(*(_types(each, root) for each in alternatives(found, root)))


def resolved(given: object, root: Mapping[str, object]) -> Mapping[str, object]:
    """A schema, or the one that it refers to within `root`; empty where that is none."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(given, Mapping):
            break
        reference = given.get("$ref")
        if not isinstance(reference, str):
            return given
        kind, _, name = reference.removeprefix("#/").partition("/")
        named = root.get(kind)
        given = named.get(name) if isinstance(named, Mapping) else None
    return {}


def alternatives(given: Mapping[str, object], root: Mapping[str, object]) -> list[Mapping[str, object]]:
    """The schemas of which a value may keep to one, themselves without further ones."""
    several = [each for key in ("anyOf", "oneOf") if isinstance(some := given.get(key), list) for each in some]
    return [found for each in several if not (found := resolved(each, root)).keys() & {"anyOf", "oneOf"}]


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


_READERS: Mapping[str, Callable[[str, Tools], Read | None]] = MappingProxyType(
    {
        "qwen3": _marked,
        "qwen3_coder": _marked_xml,
        "llama3": _bare,
        "pythonic": _python_list,
        "olmo3": _python_lines,
        "mistral": _mistral,
        "mistral_v11": _mistral,
        "granite": _granite,
    }
)
