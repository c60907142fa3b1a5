"""Reads the parameters that say what an answer must look like: `response_format` and `structured_outputs`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from settings import LimitSettings
from worker.lines.fields import BodyModel, ServiceFields
from worker.lines.strict_json import json_in_string

GivenKind = Literal["json_object", "json_schema", "regex", "choice", "lark"]

MAX_SCORED_CHOICES = 256  # each is a sequence of its own

_NAMES = frozenset(
    {"response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}
)


@dataclass(frozen=True, slots=True)
class GivenGrammar:
    """What a line wants its answer to look like; whether it can be compiled, the engine says."""

    kind: GivenKind
    text: str  # a JSON schema, a JSON list of the choices, a regular expression, Lark or GBNF; "" for json_object
    param: str = "response_format"  # the parameter that said so


def _choices_text(value: object) -> str:
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("invalid_type", "a list of one string or more")
    for position, choice in enumerate(value):
        if not isinstance(choice, str):
            raise PydanticCustomError("invalid_type", "a string", {"at": position})
        if not choice:
            raise PydanticCustomError("invalid_value", "a string that is not empty", {"at": position})
    return _json(list(dict.fromkeys(value)))


ChoicesText = Annotated[str, BeforeValidator(_choices_text)]


def _schema_text(value: object, info: ValidationInfo[LimitSettings]) -> str:
    """A JSON schema, as an object or as JSON in a string (vLLM takes both), as JSON text in its own key order."""
    if isinstance(value, str):
        value = json_in_string(value, info, "a JSON schema, an object")
    if not isinstance(value, dict):
        raise PydanticCustomError("invalid_type", "a JSON schema, an object")
    return _json(value)


SchemaText = Annotated[str, BeforeValidator(_schema_text)]


class JsonSchemaFormat(BodyModel):
    """A named JSON schema. Answers are held to all of it, whether `strict` is true or not."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None  # OpenAI shows it to the model; here the prompt says what it says
    schema_text: Annotated[SchemaText, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(BodyModel):
    """Text of any kind, a JSON object of any kind, or JSON that a schema describes."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise PydanticCustomError("missing", "an object", {"at": "json_schema"})
        if self.type != "json_schema" and self.json_schema is not None:
            at = {"at": "json_schema", "value": "set"}
            raise PydanticCustomError("invalid_value", "only with type json_schema", at)
        return self

    @property
    def grammar(self) -> GivenGrammar | None:
        """What the answer is held to; None for text."""
        if self.json_schema is not None:
            return GivenGrammar("json_schema", self.json_schema.schema_text, "response_format")
        return GivenGrammar("json_object", "", "response_format") if self.type == "json_object" else None


class StructuredOutputs(BodyModel):
    """One of the forms that an answer can be held to."""

    schema_text: Annotated[SchemaText | None, Field(alias="json")] = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: ChoicesText | None = None
    grammar_text: Annotated[str | None, Field(alias="grammar", min_length=1)] = None
    json_object: bool | None = None  # false: not asked for

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if len(self._grammars()) != 1:
            raise PydanticCustomError("invalid_value", "one of json, regex, choice, grammar and json_object")
        return self

    def _grammars(self) -> list[GivenGrammar]:
        texts: dict[GivenKind, str | None] = {
            "json_schema": self.schema_text,
            "regex": self.regex,
            "choice": self.choice,
            "lark": self.grammar_text,
            "json_object": "" if self.json_object else None,
        }
        return [GivenGrammar(kind, text, "structured_outputs") for kind, text in texts.items() if text is not None]

    @property
    def grammar(self) -> GivenGrammar:
        """What the answer is held to."""
        return self._grammars()[0]


class GrammarFields(ServiceFields):
    """OpenAI's `response_format`, and vLLM's names for the same and more, old and new. A line may have one of them."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaText | None = None
    guided_regex: Annotated[str, Field(min_length=1)] | None = None
    guided_choice: ChoicesText | None = None
    guided_grammar: Annotated[str, Field(min_length=1)] | None = None
    choice_logprobs: bool = False  # of each choice as the answer, whichever is chosen

    @model_validator(mode="after")
    def _has_one_grammar(self) -> Self:
        if self._names_grammar:
            params = [given.param for given in self._grammars()]
            if len(params) > 1:
                accepted = f"a line without it, or without {params[0]}"
                raise PydanticCustomError("invalid_value", "{accepted}", {"accepted": accepted, "at": params[1]})
        if self.choice_logprobs:
            self._check_scored()
        return self

    def _check_scored(self) -> None:
        given, accepted = self.grammar, ""
        if given is None or given.kind != "choice":
            accepted = "true only with guided_choice or structured_outputs.choice"
        elif len(self.scored_choices) > MAX_SCORED_CHOICES:
            accepted = f"true with at most {MAX_SCORED_CHOICES} choices"
        if accepted:
            raise PydanticCustomError("invalid_value", "{accepted}", {"accepted": accepted, "at": "choice_logprobs"})

    @property
    def scored_choices(self) -> list[str]:
        """The choices whose log-probabilities are asked for, each once; none: none are."""
        given = self.grammar if self.choice_logprobs else None
        return [] if given is None else json.loads(given.text)

    @property
    def grammar(self) -> GivenGrammar | None:
        """What the answer is held to."""
        return next(iter(self._grammars()), None) if self._names_grammar else None

    @property
    def _names_grammar(self) -> bool:
        """Whether it may have a grammar: on few lines."""
        return not self.model_fields_set.isdisjoint(_NAMES)

    def _grammars(self) -> list[GivenGrammar]:
        forms = (self.response_format, self.structured_outputs)
        given = [form.grammar for form in forms if form is not None]
        guided: tuple[tuple[GivenKind, str | None, str], ...] = (
            ("json_schema", self.guided_json, "guided_json"),
            ("regex", self.guided_regex, "guided_regex"),
            ("choice", self.guided_choice, "guided_choice"),
            ("lark", self.guided_grammar, "guided_grammar"),
        )
        given += [GivenGrammar(kind, text, param) for kind, text, param in guided if text is not None]
        return [grammar for grammar in given if grammar is not None]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
