"""The sandbox that chat templates run in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

Pairs = Mapping[str, object] | Iterable[tuple[str, object]]


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
