"""What every object inside a request body has in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, PrivateAttr, model_validator


class BodyModel(BaseModel):
    """A frozen object that refuses unknown keys and converts no types ("10" is not a number, true is not 1).

    A known key whose value is null counts as absent, as the OpenAI API has it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    nullable: ClassVar[frozenset[str]] = frozenset()  # keys whose null is a value of its own

    _given: Mapping[str, object] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _without_nulls(cls, value: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(value, dict):
            return handler(value)
        optional = cls.model_fields.keys() - cls.nullable
        model = handler({key: item for key, item in value.items() if item is not None or key not in optional})
        model._given = value
        return model

    def as_given(self) -> dict[str, object]:
        """The object as the line had it, key order included: a template's `tojson` shows that order."""
        return dict(self._given)
