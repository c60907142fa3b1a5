"""Builds the grammar that holds an answer to a form, and allows reasoning and tool calls around it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from engine.errors import InvalidRequest
from engine.structured.grammar import ANY_OBJECT, Grammar, form_rules, json_rule, quoted
from worker.lines.chat import ChatBody, ToolChoice, ToolFunction
from worker.lines.grammar import GivenGrammar
from worker.records.answers import REASONING_BEGIN, REASONING_END
from worker.records.harmony import (
    ANSWER_CHANNEL,
    CALL_CHANNEL,
    CHANNEL,
    CONSTRAIN,
    END,
    MESSAGE,
    REASONING_CHANNEL,
    START,
)
from worker.records.tool_calls import (
    CALL_BEGIN,
    CALL_END,
    FUNCTION_BEGIN,
    FUNCTION_END,
    LIST_BEGIN,
    MARKS,
    MISTRAL_ARGUMENTS,
    MISTRAL_CALLS,
    PARAMETER_BEGIN,
    PARAMETER_END,
    PYTHON_BEGIN,
    PYTHON_END,
    PYTHON_TAG,
    alternatives,
    argument_types,
    resolved,
)
from worker.requests.chat_prompts import ChatPrompts

_NO_ARGUMENTS: Mapping[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}
_TEXT_RULES = frozenset({"pattern", "format", "minLength", "maxLength", "const", "enum", "allOf", "not", "if"})
_ARGUMENT_NAME = re.compile(r"[^\s()\[\]{}'\",=]+")  # that a call in Python's form can have
_SAY_WHAT = frozenset({"type", "$ref", "anyOf", "oneOf", "allOf", "const", "enum"})


class _Form(NamedTuple):
    """How calls stand in an answer: the mark's text, the mark and what follows it in a rule's words."""

    text: str
    mark: str
    rest: str
    between: str  # of two calls
    is_repeated: bool  # the mark before each call; else once before all of them


class CallGrammar:
    """Grammars for chat answers in one model's formats.

    Calls have the marks that the model was trained to write, so that a forced call is text it knows.
    """

    def __init__(self, prompts: ChatPrompts, special: Mapping[str, int]) -> None:
        """`special`: the formats' marks that are special tokens, with their ids; the others are text."""
        self._prompts = prompts
        self._formats = prompts.formats
        self._special = special

    def of(self, body: ChatBody) -> Grammar | None:
        """What the answer to `body` is held to; None: nothing.

        With tool_choice required or a function's name it must be calls. Otherwise the arguments of strict functions
        keep to their schema, and an answer that is held to a form may be calls instead. Raises InvalidRequest.
        """
        given = body.grammar
        is_forced = body.tool_choice not in (None, "auto", "none")
        is_strict = any(tool.function.strict for tool in body.offered_tools)
        if is_forced or is_strict or (given and body.offered_tools and self._reads_calls):
            self._check(given, is_forced=is_forced)
            rules = self._with_calls(body, given, is_forced=is_forced)
            param = "tool_choice" if is_forced else "tools" if given is None else given.param
            return self._from_the_start(body, rules, param)
        return None if given is None else self._of_form(body, given)

    def _of_form(self, body: ChatBody, given: GivenGrammar) -> Grammar:
        stands_alone = given.kind == "lark" and not self._prompts.opens_reasoning(body)
        if (self._formats.reasoning == "none" and not self._formats.is_harmony) or stands_alone:
            return Grammar(given.kind, given.text, given.param)
        return self._from_the_start(body, [f"answer: {self._before_answer}shape", _shape(given)], given.param)

    @property
    def _before_answer(self) -> str:
        """What stands before an answer that is no call, in a rule's words."""
        is_harmony = self._formats.is_harmony
        return f'{self._mark(CHANNEL)} "{ANSWER_CHANNEL}" {self._mark(MESSAGE)} ' if is_harmony else ""

    def _from_the_start(self, body: ChatBody, answer: list[str], param: str) -> Grammar:
        """The grammar of the rules of `answer`, with the reasoning before it."""
        rules = ["start: answer"]
        if self._formats.is_harmony:
            begin = f'{self._mark(CHANNEL)} "{REASONING_CHANNEL}" {self._mark(MESSAGE)}'
            rules = [
                f'start: ({begin} inside {self._mark(START)} "assistant")? answer',
                self._up_to("inside", self._mark(END)),
            ]
        elif self._formats.reasoning != "none":
            begin, end = self._mark(REASONING_BEGIN), self._mark(REASONING_END)
            reasoning = "inside GAP?" if self._prompts.opens_reasoning(body) else f"({begin} inside GAP?)?"
            rules = [f"start: {reasoning} answer", self._up_to("inside", end), r"GAP: /\n{1,2}/"]
        return Grammar("lark", "\n".join([*rules, *answer]), param)

    @property
    def _reads_calls(self) -> bool:
        return self._formats.tool_calls in MARKS or self._formats.tool_calls == "harmony"

    def _check(self, given: GivenGrammar | None, *, is_forced: bool) -> None:
        if not self._reads_calls:
            accepted = "none or auto, and no strict function, where model.tool_call_format is none"
            raise _refuse("tool_choice" if is_forced else "tools", accepted)
        if given is not None and is_forced:
            raise _refuse("tool_choice", f"auto or none beside {given.param}")

    def _with_calls(self, body: ChatBody, given: GivenGrammar | None, *, is_forced: bool) -> list[str]:
        """The rules of `answer`: calls; or what is `given`; or, where neither, calls in free text."""
        written = self._formats.tool_calls
        rules = call_rules(body, self._arguments_of, is_forced=is_forced)
        if given is not None:
            rules.append(_shape(given))
        if written == "harmony":  # a call ends the answer: another one is the next answer's
            other = "" if is_forced else f" | {self._before_answer}{'shape' if given else 'FREE'}"
            return [f"answer: call{other}", r"FREE: /(?s:.*)/", *rules]
        if written == "llama3":
            tag = self._mark(PYTHON_TAG)
            if given is not None:  # the shape may be an object too: the tag tells them apart
                return [f"answer: {tag} call | shape", *rules]
            # Free text begins with no brace: it would be a call that keeps to no schema.
            free = "" if is_forced else " | FREE"
            return [f"answer: {tag}? call{free}", r"FREE: /(\s*[^{\s](?s:.*))?/", *rules]
        several = body.parallel_tool_calls and not isinstance(body.tool_choice, ToolChoice)
        if written == "pythonic":  # free text begins with no bracket, for the same reason
            other = "" if is_forced else " | shape" if given else " | FREE"
            more = ' (", " call)*' if several else ""
            calls = f'calls: "[" call{more} "]"'
            return [f"answer: {self._mark(PYTHON_TAG)}? calls{other}", calls, r"FREE: /(\s*[^\[\s](?s:.*))?/", *rules]
        form = self._form(several=several)
        rules.append(f"rest: {form.rest}")
        if is_forced or given:
            again = f" ({form.between}{form.mark} rest)*" if form.is_repeated and several else ""
            return [f"answer: {form.mark} rest{again}{' | shape' if given else ''}", *rules]
        free = f"FREE: /(?s:.*)/ & ~/(?s:.*){re.escape(form.text)}(?s:.*)/"
        again = "*" if form.is_repeated and several else "?"
        behind = "FREE?" if form.is_repeated else ""
        answer = f"(open rest){again} {behind}" if form.is_repeated else "open rest | FREE?"
        return [f"answer: {answer}", self._up_to("open", form.mark), free, *rules]

    def _form(self, *, several: bool) -> _Form:
        """How calls stand behind their mark."""
        written = self._formats.tool_calls
        if written in ("qwen3", "qwen3_coder"):
            rest = f'"\\n" call "\\n" {self._mark(CALL_END)}'
            return _Form(CALL_BEGIN, self._mark(CALL_BEGIN), rest, between='"\\n" ', is_repeated=True)
        if written == "mistral_v11":
            return _Form(MISTRAL_CALLS, self._mark(MISTRAL_CALLS), "call", between="", is_repeated=True)
        if written == "olmo3":
            more = ' ("\\n" call)*' if several else ""
            rest = f'"\\n"? call{more} "\\n"? {self._mark(PYTHON_END)}'
            return _Form(PYTHON_BEGIN, self._mark(PYTHON_BEGIN), rest, between="", is_repeated=False)
        mark = MISTRAL_CALLS if written == "mistral" else LIST_BEGIN
        more = ' (", " call)*' if several else ""
        return _Form(mark, self._mark(mark), f'" "? "[" call{more} "]"', between="", is_repeated=False)

    def _arguments_of(self, name: str, function: ToolFunction, *, is_held: bool) -> tuple[str, list[str]]:
        """A call in a rule's words, and the rules of its arguments, named `name`; `is_held`: to the function's schema.

        Raises ValueError for a schema.
        """
        written = self._formats.tool_calls
        if written == "qwen3_coder":
            return _xml_call(name, function, is_held=is_held)
        if written in ("pythonic", "olmo3"):
            return _python_call(name, function, is_held=is_held)
        rules = [json_rule(name, _parameters(function) if is_held else ANY_OBJECT)]
        if written == "mistral_v11":
            return f"{quoted(function.name)} {self._mark(MISTRAL_ARGUMENTS)} {name}", rules
        if written == "harmony":
            head = f"{self._mark(CHANNEL)} {quoted(f'{CALL_CHANNEL} to=functions.{function.name} ')}"
            return f'{head} {self._mark(CONSTRAIN)} "json" {self._mark(MESSAGE)} {name}', rules
        key = "parameters" if written == "llama3" else "arguments"
        head = quoted(f'{{"name": "{function.name}", "{key}": ')
        return f'{head} {name} "}}"', rules

    def _mark(self, mark: str) -> str:
        return f"<[{self._special[mark]}]>" if mark in self._special else quoted(mark)

    @staticmethod
    def _up_to(name: str, mark: str) -> str:
        """The rule of any text and the first `mark` behind it."""
        if mark.startswith("<["):
            return f"{name}: /(?s:.*)/ {mark}"
        return f"{name}[suffix={mark}]: /(?s:.*)/"


def _refuse(param: str, accepted: str) -> InvalidRequest:
    return InvalidRequest(f"{param} cannot be held to here; accepted: {accepted}", param=param)


def _shape(given: GivenGrammar) -> str:
    """The rules of `shape`: what a line wants its answer to look like."""
    if given.kind == "lark":
        raise InvalidRequest(
            f"{given.param} is a grammar of its own, which neither tools nor a prompt that begins the reasoning leave "
            f"room for; accepted: a JSON schema, a regular expression or choices",
            param=given.param,
        )
    try:
        return form_rules("shape", given.kind, given.text)
    except ValueError as error:
        raise InvalidRequest(f"{given.param}: {error}", param=given.param) from error


def call_rules(body: ChatBody, spelled: Callable[..., tuple[str, list[str]]], *, is_forced: bool) -> list[str]:
    """`call`: a call, as `spelled`, of one of the functions that may be called.

    Arguments keep to the function's schema where it is strict or `is_forced`. Raises InvalidRequest for a schema.
    """
    calls: list[str] = []
    rules: list[str] = []
    for position, tool in enumerate(body.offered_tools):
        function = tool.function
        if isinstance(body.tool_choice, ToolChoice) and body.tool_choice.function.name != function.name:
            continue
        try:
            call, of_arguments = spelled(f"arguments{position}", function, is_held=bool(is_forced or function.strict))
        except ValueError as error:
            param = f"tools[{position}].function.parameters"
            raise InvalidRequest(f"{param}: {error}", param=param) from error
        calls.append(call)
        rules += of_arguments
    return [f"call: {' | '.join(calls)}", *rules]


def _xml_call(name: str, function: ToolFunction, *, is_held: bool) -> tuple[str, list[str]]:
    """A call as Qwen3-Coder writes it: texts as they are, other arguments as JSON, each to the end of its element."""
    end = quoted(f"\n{PARAMETER_END}\n")
    rules = [f"{name}text[suffix={end}]: /(?s:.*)/"]
    call = f"{quoted(f'{FUNCTION_BEGIN}{function.name}>' + chr(10))} {name} {quoted(FUNCTION_END)}"
    if not is_held:
        return call, [f'{name}: ("{PARAMETER_BEGIN}" /[^>\\n]+/ ">\\n" {name}text)*', *rules]
    schema = _parameters(function)
    properties, required = _named_arguments(schema)
    parts: list[str] = []
    for position, (key, given) in enumerate(properties.items()):
        value = f"{name}x{position}"
        begin = quoted(f"{PARAMETER_BEGIN}{key}>\n")
        parts.append(f"({begin} {value}){'' if key in required else '?'}")
        rules.append(_xml_value(value, given, schema, f"{name}text", end))
    return call, [f"{name}: {' '.join(parts)}", *rules]


def _named_arguments(schema: Mapping[str, object]) -> tuple[Mapping[str, object], Collection[str]]:
    """The arguments of a function with their schemas, and which of them a call must have. Raises ValueError."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list) or set(required) - properties.keys():
        raise ValueError(
            "calls of this format are held to the arguments that are named; accepted: an object with properties"
        )
    return properties, required


def _python_call(name: str, function: ToolFunction, *, is_held: bool) -> tuple[str, list[str]]:
    """A call as Python writes it. Values are JSON, but for True, False and None where those are all there is to say."""
    call = f'{quoted(function.name + "(")} {name} ")"'
    if not is_held:
        value = f'{name}json | "True" | "False" | "None"'
        rules = [f'{name}: ({name}each (", " {name}each)*)?', f'{name}each: /[A-Za-z_][A-Za-z0-9_]*/ "=" ({value})']
        return call, [*rules, json_rule(f"{name}json", {})]
    schema = _parameters(function)
    properties, required = _named_arguments(schema)
    # None of the arguments from one on has to follow: `first` where there is none before them, `more` where there is.
    rules = [f"{name}: {name}first0", f'{name}first{len(properties)}: ""', f'{name}more{len(properties)}: ""']
    for position, (key, given) in enumerate(properties.items()):
        if not _ARGUMENT_NAME.fullmatch(key):
            raise ValueError(f"{key!r} is no name that a call in Python's form can have; accepted: a word")
        value, behind = f"{name}value{position}", f"{name}more{position + 1}"
        for kind, before in (("first", ""), ("more", ", ")):
            without = "" if key in required else f" | {name}{kind}{position + 1}"
            rules.append(f"{name}{kind}{position}: {quoted(f'{before}{key}=')} {value} {behind}{without}")
        rules.append(_python_value(value, given, schema))
    return call, rules


def _python_value(name: str, given: object, schema: Mapping[str, object]) -> str:
    if given == {"type": "boolean"}:
        return f'{name}: "True" | "False"'
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return json_rule(name, {**definitions, **given} if isinstance(given, Mapping) else given)


def _xml_value(name: str, given: object, schema: Mapping[str, object], text: str, end: str) -> str:
    """The rule `name` of an argument and the `end` of its element; `text`: the rule of any text up to there."""
    types = argument_types({**schema, "properties": {"": given}}, "")
    if not types or not isinstance(given, Mapping):
        raise ValueError("an argument of a call in XML has no type; accepted: its type, enum, anyOf or a $ref")
    if "string" not in types:
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        return json_rule(f"{name}json", {**definitions, **given}) + f"\n{name}: {name}json {end}"
    found = resolved(given, schema)
    values = found.get("enum")
    if isinstance(values, list) and types == {"string"}:
        return f"{name}: ({' | '.join(quoted(str(value)) for value in values)}) {end}"
    for each in (found, *alternatives(found, schema)):
        unmet = each.keys() & _TEXT_RULES
        if unmet:
            raise ValueError(
                f"a text of a call in XML cannot be held to {min(unmet)}; accepted: its type, or enum alone"
            )
    return f"{name}: {text}"


def _parameters(function: ToolFunction) -> Mapping[str, object]:
    if function.parameters is None:
        return _NO_ARGUMENTS  # as OpenAI reads their absence
    return function.parameters if _SAY_WHAT & function.parameters.keys() else {**ANY_OBJECT, **function.parameters}
