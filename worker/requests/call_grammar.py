"""Builds the grammar that holds an answer to a form, and allows reasoning and tool calls around it."""

from __future__ import annotations

from collections.abc import Mapping

from engine.errors import InvalidRequest
from engine.structured.grammar import ANY_OBJECT, Grammar, form_rules, json_rule, quoted
from worker.lines.chat import ChatBody, ToolChoice, ToolFunction
from worker.lines.grammar import GivenGrammar
from worker.records.answers import CALL_BEGIN, CALL_END, PYTHON_TAG, REASONING_BEGIN, REASONING_END
from worker.requests.chat_prompts import ChatPrompts

_NO_ARGUMENTS: Mapping[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}
_SAY_WHAT = frozenset({"type", "$ref", "anyOf", "oneOf", "allOf", "const", "enum"})


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
        if self._formats.reasoning == "none" or stands_alone:
            return Grammar(given.kind, given.text, given.param)
        return self._from_the_start(body, ["answer: shape", _shape(given)], given.param)

    def _from_the_start(self, body: ChatBody, answer: list[str], param: str) -> Grammar:
        """The grammar of the rules of `answer`, with the reasoning before it."""
        rules = ["start: answer"]
        if self._formats.reasoning != "none":
            begin, end = self._mark(REASONING_BEGIN), self._mark(REASONING_END)
            reasoning = "inside GAP?" if self._prompts.opens_reasoning(body) else f"({begin} inside GAP?)?"
            rules = [f"start: {reasoning} answer", self._up_to("inside", end), r"GAP: /\n{1,2}/"]
        return Grammar("lark", "\n".join([*rules, *answer]), param)

    @property
    def _reads_calls(self) -> bool:
        return self._formats.tool_calls in ("qwen3", "llama3")

    def _check(self, given: GivenGrammar | None, *, is_forced: bool) -> None:
        if not self._reads_calls:
            accepted = "none or auto, and no strict function, where model.tool_call_format is none"
            raise _refuse("tool_choice" if is_forced else "tools", accepted)
        if given is not None and is_forced:
            raise _refuse("tool_choice", f"auto or none beside {given.param}")

    def _with_calls(self, body: ChatBody, given: GivenGrammar | None, *, is_forced: bool) -> list[str]:
        rules = call_rules(body, key=self._arguments_key, is_forced=is_forced)
        if given is not None:
            rules.append(_shape(given))
        if self._formats.tool_calls == "llama3":
            tag = self._mark(PYTHON_TAG)
            if given is not None:  # the shape may be an object too: the tag tells them apart
                return [f"answer: {tag} call | shape", *rules]
            # Free text begins with no brace: it would be a call that keeps to no schema.
            free = "" if is_forced else " | FREE"
            return [f"answer: {tag}? call{free}", r"FREE: /(\s*[^{\s](?s:.*))?/", *rules]
        begin, end = self._mark(CALL_BEGIN), self._mark(CALL_END)
        several = body.parallel_tool_calls and not isinstance(body.tool_choice, ToolChoice)
        rules.append(f'marked: {begin} rest\nrest: "\\n" call "\\n" {end}')
        calls = 'marked ("\\n" marked)*' if several else "marked"
        if is_forced or given:
            return [f"answer: {calls}{' | shape' if given else ''}", *rules]
        free = r"FREE: /(?s:.*)/ & ~/(?s:.*)" + CALL_BEGIN + r"(?s:.*)/"
        return [f"answer: (open rest){'*' if several else '?'} FREE?", self._up_to("open", begin), free, *rules]

    @property
    def _arguments_key(self) -> str:
        return "parameters" if self._formats.tool_calls == "llama3" else "arguments"

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


def call_rules(body: ChatBody, *, key: str, is_forced: bool) -> list[str]:
    """`call`: the object of a name and arguments (under `key`) of one of the functions that may be called.

    Arguments keep to the function's schema where it is strict or `is_forced`. Raises InvalidRequest for a schema.
    """
    calls: list[str] = []
    rules: list[str] = []
    for position, tool in enumerate(body.offered_tools):
        function = tool.function
        if isinstance(body.tool_choice, ToolChoice) and body.tool_choice.function.name != function.name:
            continue
        head = quoted(f'{{"name": "{function.name}", "{key}": ')
        calls.append(f'{head} arguments{position} "}}"')
        schema = _parameters(function) if is_forced or function.strict else ANY_OBJECT
        try:
            rules.append(json_rule(f"arguments{position}", schema))
        except ValueError as error:
            param = f"tools[{position}].function.parameters"
            raise InvalidRequest(f"{param}: {error}", param=param) from error
    return [f"call: {' | '.join(calls)}", *rules]


def _parameters(function: ToolFunction) -> Mapping[str, object]:
    if function.parameters is None:
        return _NO_ARGUMENTS  # as OpenAI reads their absence
    return function.parameters if _SAY_WHAT & function.parameters.keys() else {**ANY_OBJECT, **function.parameters}
