"""From a conversation to the prompt the model was trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial

from jinja2 import Template, meta, nodes
from jinja2.exceptions import TemplateError, TemplateSyntaxError

from engine.errors import CheckpointError, InvalidRequest
from engine.text.surrogates import check_encodable
from engine.text.template_environment import template_environment
from engine.text.text_parts import takes_parts

MAX_PROMPT_CHARACTERS = 4 << 20  # far above any context; stops a loop that writes without end
RESERVED = ("messages", "tools", "add_generation_prompt", "strftime_now")
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


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
                template.globals = dict(template.globals)  # a render copies them: 2 us, of a ChainMap 19
                tree = environment.parse(source)
                self._literals[name] = frozenset(_literals(tree))
                self._variables[name] = meta.find_undeclared_variables(tree)  # folds constants of the tree: last
            except TemplateSyntaxError as error:
                raise CheckpointError(f"chat template {name!r}, line {error.lineno}: {error.message}") from error
        trial = {**self._special_tokens, "strftime_now": datetime.fromtimestamp(0, UTC).strftime}
        self._takes_parts = {
            name: takes_parts(partial(_run, template), trial) for name, template in self._templates.items()
        }

    def reads(self, variable: str, *, with_tools: bool) -> bool:
        """Whether the template for a conversation with or without tools reads `variable`, or else ignores it."""
        return variable in self._variables[self._name(with_tools=with_tools)]

    def writes(self, text: str) -> bool:
        """Whether `text` stands in what one of the templates itself writes or compares with."""
        return any(text in literal for literals in self._literals.values() for literal in literals)

    def knows_role(self, role: str, *, with_tools: bool) -> bool:
        """Whether the template has a word for `role`; one that has not writes its messages as it happens, or not."""
        return role in self._literals[self._name(with_tools=with_tools)]

    def takes_parts(self, *, with_tools: bool) -> bool:
        """Whether the template writes the text of a message whose content is a list of text parts."""
        return self._takes_parts[self._name(with_tools=with_tools)]

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

        `now`: the time that the template's `strftime_now` writes; the caller's, since a prompt made again is to be the
        same one.

        Raises InvalidRequest with param "messages" if the template refuses the conversation or fails on it, or if
        the prompt exceeds 4 Mi characters or cannot be encoded.
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
    """As transformers does: null means absent, and reasoning goes by every name that templates know."""
    plain = {key: value for key, value in message.items() if value is not None}
    reasoning = next((plain[key] for key in REASONING_KEYS if key in plain), None)
    if reasoning is None:
        return plain
    return {"thinking": reasoning} | plain | {"reasoning_content": reasoning}


def _invalid(message: str, value: object) -> InvalidRequest:
    return InvalidRequest(message, param="messages", value=value, accepted="what the model's chat template takes")
