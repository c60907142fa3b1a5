"""What a line wants its answer to look like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GivenKind = Literal["json_object", "json_schema", "regex", "choice", "lark"]


@dataclass(frozen=True, slots=True)
class GivenGrammar:
    """What a line wants its answer to look like; whether it can be compiled, the engine says."""

    kind: GivenKind
    text: str  # a JSON schema, a JSON list of the choices, a regular expression, Lark or GBNF; "" for json_object
    param: str = "response_format"  # the parameter that said so
