"""Every setting there is, read off the models."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Annotated, Literal, Union, cast, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from settings.accepted import Accepted
from settings.grammar import BOOLEAN_FORMS, NONE_WORD, write
from settings.group_config import VALUE_CONFIG
from settings.root import Settings
from settings.setting_spec import SettingSpec
from settings.units import Unit


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Every setting by its dotted key, and the keys of the groups that hold them."""

    specs: Mapping[str, SettingSpec]
    groups: frozenset[str]

    @classmethod
    @cache  # 16 ms, and always the same
    def read(cls) -> Catalogue:
        """The catalogue of `Settings`."""
        specs = {spec.key: spec for spec in _walk(Settings, "")}
        groups = {key[:index] for key in specs for index, letter in enumerate(key) if letter == "."}
        return cls(MappingProxyType(specs), frozenset(groups))

    def nearest(self, name: str) -> tuple[SettingSpec, bool]:
        """The setting whose key is most like `name` (dotted), and whether it is likely to be what was meant."""
        name = name.lower()
        spec = max(self.specs.values(), key=lambda candidate: likeness(name, candidate.key))
        return spec, likeness(name, spec.key) >= 0.7


def likeness(name: str, key: str) -> float:
    """0 to 1; a right last part with wrong groups (`block_size`) counts nearly as much as a whole key."""
    whole = difflib.SequenceMatcher(None, name, key, autojunk=False).ratio()
    last, key_last = name.rpartition(".")[2], key.rpartition(".")[2]
    return max(whole, 0.9 * difflib.SequenceMatcher(None, last, key_last, autojunk=False).ratio())


def _walk(model: type[BaseModel], prefix: str) -> Iterator[SettingSpec]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _walk(field.annotation, f"{prefix}{name}.")
        else:
            yield _spec(f"{prefix}{name}", field)


def _spec(key: str, field: FieldInfo) -> SettingSpec:
    annotation, optional, marks = _unwrap(field)
    choices = tuple(get_args(annotation)) if get_origin(annotation) is Literal else ()
    kind = str if choices else annotation
    if not isinstance(kind, type):
        raise TypeError(f"{key}: settings of type {annotation} are not supported")
    units = [mark.name for mark in marks if isinstance(mark, Unit)]
    accepted = _accepted(kind, choices, marks)
    declared = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    return SettingSpec(
        key=key,
        kind=kind,
        choices=choices,
        optional=optional,
        unit=units[0] if units else None,
        accepted=f"{accepted}, or {NONE_WORD}" if optional else accepted,
        description=field.description or "",
        default=field.get_default(),
        adapter=TypeAdapter(cast("type[object]", declared), config=VALUE_CONFIG),
    )


def _unwrap(field: FieldInfo) -> tuple[object, bool, tuple[object, ...]]:
    """The bare type, whether None is accepted, and all marks on it, inside and outside of `| None`."""
    annotation: object = field.annotation
    marks = tuple(field.metadata)
    optional = False
    if get_origin(annotation) is Union or type(None) in get_args(annotation):
        (annotation,) = [member for member in get_args(annotation) if member is not type(None)]
        optional = True
    if get_origin(annotation) is Annotated:
        annotation, *inner = get_args(annotation)
        marks += tuple(inner)
    return annotation, optional, marks


def _accepted(kind: type, choices: tuple[str, ...], marks: tuple[object, ...]) -> str:
    for mark in marks:
        if isinstance(mark, Accepted):
            return mark.text
    if choices:
        return f"{', '.join(choices[:-1])} or {choices[-1]}"
    if kind is bool:
        return BOOLEAN_FORMS
    return {int: "a whole number", float: "a number"}[kind] + _bounds(marks)


def _bounds(marks: tuple[object, ...]) -> str:
    low = next((f"{write(mark.ge)}" for mark in marks if isinstance(mark, Ge)), None)
    above = next((f" above {write(mark.gt)}" for mark in marks if isinstance(mark, Gt)), None)
    high = next((write(mark.le) for mark in marks if isinstance(mark, Le)), None)
    below = next((f" below {write(mark.lt)}" for mark in marks if isinstance(mark, Lt)), None)
    if low is not None and high is not None:
        return f", {low} to {high}"
    lower = above or (f", at least {low}" if low is not None else "")
    upper = below or (f", at most {high}" if high is not None else "")
    return lower + upper
