"""Renders a conversation into the prompt that the model was trained on, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NoReturn

from jinja2 import Template, meta, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from engine.checkpoint.config_reader import read_text
from engine.errors import CheckpointError, InvalidRequest

MAX_PROMPT_CHARACTERS = 4 << 20  # far above any context; stops a loop that writes without end
RESERVED = ("messages", "tools", "add_generation_prompt", "strftime_now")
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")

MAX_TEMPLATE_BYTES = 1 << 20  # the longest published ones are about 20 KB

_FIRST, _SECOND = "first-part", "second-part"

Pairs = Mapping[str, object] | Iterable[tuple[str, object]]


class ChatTemplate:
    """The chat templates of one model; byte-equal with transformers' `apply_chat_template(tokenize=False)`.

    There is no time limit: the template ships with the model that the operator chose, a job brings only data, and
    loops run over that data, whose size limits.max_prompt_bytes bounds.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """`templates`: name -> source, with "default" among them; `special_tokens`: `eos_token`... -> text.

        Raises CheckpointError for a template that does not parse.
        """
        if "default" not in templates:
            raise CheckpointError(
                f"chat templates are named {', '.join(sorted(templates))}; accepted: one is 'default'"
            )
        environment = template_environment()
        self._templates: dict[str, Template] = {}
        self._variables: dict[str, set[str]] = {}
        self._literals: dict[str, frozenset[str]] = {}
        self._special_tokens = dict(special_tokens)
        for name, source in templates.items():
            try:
                self._templates[name] = template = environment.from_string(source)
                template.globals = dict(template.globals)  # a render copies them: 2 us, and 19 from a ChainMap
                tree = environment.parse(source)
                self._literals[name] = frozenset(_literals(tree))
                self._variables[name] = meta.find_undeclared_variables(tree)  # last: it folds constants
            except TemplateSyntaxError as error:
                raise CheckpointError(f"chat template {name!r}, line {error.lineno}: {error.message}") from error
        trial = {**self._special_tokens, "strftime_now": datetime.fromtimestamp(0, UTC).strftime}
        self._takes_parts = {
            (name, role): takes_parts(partial(_run, template), trial, role)
            for name, template in self._templates.items()
            for role in ("user", "system")
        }

    def reads(self, variable: str, *, with_tools: bool) -> bool:
        """Whether the template for conversations with or without tools reads `variable`."""
        return variable in self._variables[self._name(with_tools=with_tools)]

    def writes(self, text: str) -> bool:
        """Whether one of the templates writes `text` itself, or compares with it."""
        return any(text in literal for literals in self._literals.values() for literal in literals)

    def knows_role(self, role: str, *, with_tools: bool) -> bool:
        """Whether the template names `role`; if not, it may drop messages of that role or write them somehow."""
        return role in self._literals[self._name(with_tools=with_tools)]

    def takes_parts(self, *, with_tools: bool, role: str = "user") -> bool:
        """Whether the template writes the texts of a message whose content is a list of text parts.

        The system's message is tried by itself: Gemma 3's template writes the first of its parts alone.
        """
        return self._takes_parts[self._name(with_tools=with_tools), "system" if role == "system" else "user"]

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        now: datetime,
        /,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> str:
        """The prompt; `kwargs` (`enable_thinking`...) are variables of the template and may override special tokens.

        `now`: what the template's `strftime_now` writes; given, so that a prompt made again is the same. Raises
        InvalidRequest with param "messages" if the template refuses the conversation or fails on it, or if the prompt
        exceeds 4 Mi characters or cannot be encoded.
        """
        if not messages:
            raise _invalid("messages is empty; accepted: at least one message", messages)
        for name in RESERVED:
            if name in kwargs:
                raise InvalidRequest(
                    f"chat_template_kwargs has {name!r}, which the request itself sets; accepted: other names",
                    param="chat_template_kwargs",
                    value=name,
                    accepted=f"any names but {', '.join(RESERVED)}",
                )
        variables = {"documents": None} | self._special_tokens | kwargs
        variables |= {
            "messages": [_normalise(message) for message in messages],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": now.strftime,
        }
        text = _run(self._templates[self._name(with_tools=tools is not None)], variables)
        check_encodable(text, param="messages")
        return text

    def _name(self, *, with_tools: bool) -> str:
        return "tool_use" if with_tools and "tool_use" in self._templates else "default"


def _literals(tree: nodes.Template) -> Iterator[str]:
    for constant in tree.find_all(nodes.Const):
        if isinstance(constant.value, str):
            yield constant.value
    for data in tree.find_all(nodes.TemplateData):
        yield data.data


def _run(template: Template, variables: Mapping[str, object]) -> str:
    pieces: list[str] = []
    room = MAX_PROMPT_CHARACTERS
    try:
        for piece in template.generate(variables):
            room -= len(piece)
            if room < 0:
                raise _invalid(
                    f"messages give a prompt of more than {MAX_PROMPT_CHARACTERS} characters", MAX_PROMPT_CHARACTERS
                )
            pieces.append(piece)
    except TemplateError as error:
        raise _invalid(f"the chat template refuses these messages: {error.message}", None) from error
    # What a foreign program may raise when a message is not of the form it expects.
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise _invalid(f"the chat template fails on these messages: {type(error).__name__}: {error}", None) from error
    return "".join(pieces)


def _normalise(message: Mapping[str, object]) -> dict[str, object]:
    """As transformers does: null means absent, and reasoning is there under every name that templates read."""
    plain = {key: value for key, value in message.items() if value is not None}
    reasoning = next((plain[key] for key in REASONING_KEYS if key in plain), None)
    if reasoning is None:
        return plain
    return {"thinking": reasoning} | plain | {"reasoning_content": reasoning}


def _invalid(message: str, value: object) -> InvalidRequest:
    return InvalidRequest(message, param="messages", value=value, accepted="what the model's chat template takes")


def read_chat_templates(path: Path, tokenizer_config: Mapping[str, object]) -> dict[str, str]:
    """Template name -> source, "default" the usual one; empty if the model has none. Raises CheckpointError.

    As in transformers: chat_template.jinja and additional_chat_templates/NAME.jinja, else `chat_template` of
    tokenizer_config.json, which is one template or a list of named ones.
    """
    files = {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    if (path / "chat_template.jinja").exists():
        files = {"default": path / "chat_template.jinja"} | files
    if files:
        return {name: read_text(file, max_bytes=MAX_TEMPLATE_BYTES) for name, file in files.items()}
    value = tokenizer_config.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict):
        return {str(name): _source(source) for name, source in value.items()}
    if not isinstance(value, list):
        raise _refuse(value)
    templates: dict[str, str] = {}
    for entry in value:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise _refuse(entry)
        templates[entry["name"]] = _source(entry.get("template"))
    return templates


def _source(value: object) -> str:
    if not isinstance(value, str):
        raise _refuse(value)
    return value


def _refuse(value: object) -> CheckpointError:
    return CheckpointError(
        f"tokenizer_config.json: chat_template holds {value!r}; accepted: a template, or a list of "
        '{"name": ..., "template": ...}'
    )


def takes_parts(
    run: Callable[[Mapping[str, object]], str], variables: Mapping[str, object], role: str = "user"
) -> bool:
    """Whether a template writes the texts of this role's message that is a list of two parts, and not the list itself.

    `run`: variables to prompt; `variables`: what the template reads beside the conversation. Tried, not read off the
    source: templates reach the parts through macros, filters and variables of their own.
    """
    content = [{"type": "text", "text": _FIRST}, {"type": "text", "text": _SECOND}]
    messages: list[dict[str, object]] = [{"role": role, "content": content}]
    if role == "system":  # which alone many templates refuse
        messages.append({"role": "user", "content": "x"})
    try:
        prompt = run({**variables, "messages": messages, "tools": None, "add_generation_prompt": False})
    except InvalidRequest:
        return False
    _, first, behind = prompt.partition(_FIRST)
    between, second, _ = behind.partition(_SECOND)
    return bool(first and second) and "type" not in between  # as Python or JSON writes the list


def check_encodable(text: str, *, param: str) -> None:
    """Raises InvalidRequest if `text` has a lone surrogate, which JSON can spell (`"\\ud800"`) and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code_point = f"U+{ord(text[error.start]):04X}"
        raise InvalidRequest(
            f"{param} has the lone surrogate {code_point} at character {error.start}; accepted: text without",
            param=param,
            value=code_point,
            accepted="text without surrogates",
        ) from error


def template_environment() -> ImmutableSandboxedEnvironment:
    """A jinja2 sandbox with the blocks, functions and filters that templates written for transformers rely on.

    A template comes with the model, never with a job, and can reach neither Python's internals nor the caller's data.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["dict"] = _PlainDict()
    environment.globals["namespace"] = _PlainNamespace
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}`: marks assistant text for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as an instance variable)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Replace the block by a call that returns its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class _PlainNamespace(Namespace):
    """jinja2's `namespace` without names that begin with an underscore."""

    def __init__(self, initial: Pairs = (), /, **names: object) -> None:
        attributes = dict(initial, **names)
        for name in attributes:
            _check_name(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _PlainDict:
    """`dict(...)` and `dict.fromkeys(...)` without the type itself."""

    def __call__(self, initial: Pairs = (), /, **names: object) -> dict[str, object]:
        """A new dict."""
        return dict(initial, **names)

    def fromkeys(self, keys: Iterable[str], value: object = None) -> dict[str, object]:
        """A new dict with one value under every key."""
        return dict.fromkeys(keys, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace may not hold {name!r}")


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
