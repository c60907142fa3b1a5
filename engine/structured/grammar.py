"""What a request's output must look like."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a request's output must look like, all of it. Equal ones are compiled once."""

    kind: GrammarKind
    text: str  # a JSON schema, a JSON list of the choices, a regular expression, Lark or GBNF; "" for json_object
    # What the caller calls it, for error messages alone: two requests may mean the same grammar by different names.
    param: str = field(default="grammar", compare=False, repr=False)
