"""What every object inside a request body has in common."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict, model_validator


class BodyModel(BaseModel):
    """A frozen object that refuses unknown keys and converts no types ("10" is not a number, true is not 1).

    A known key whose value is null counts as absent, as the OpenAI API has it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    nullable: ClassVar[frozenset[str]] = frozenset()  # keys whose null is a value of its own

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: object) -> object:
        return cls.less_nulls(value)

    @classmethod
    def less_nulls(cls, value: object) -> object:
        """`value`, if it is an object, less the optional keys that are null."""
        if not isinstance(value, dict) or None not in value.values():
            return value
        optional = cls.model_fields.keys() - cls.nullable
        return {key: item for key, item in value.items() if item is not None or key not in optional}
