"""What the objects that chat templates see have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

from pydantic import ModelWrapValidatorHandler, model_validator

from worker.lines.body_model import BodyModel


class GivenModel(BodyModel):
    """A BodyModel that remembers how the line had it.

    In a slot, not in a private attribute: pydantic's take 3 us of Python an object, and a conversation has many.
    """

    if TYPE_CHECKING:
        _given: Mapping[str, object]
    else:
        __slots__ = ("_given",)

    @model_validator(mode="wrap")
    @classmethod
    def _without_nulls(cls, value: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Takes the place of the base's validator: one call from pydantic an object, not two."""
        model = handler(cls.less_nulls(value))
        object.__setattr__(model, "_given", value)  # the model is frozen
        return model

    def as_given(self) -> dict[str, object]:
        """The object as the line had it, key order included: a template's `tojson` shows that order."""
        return dict(self._given)
