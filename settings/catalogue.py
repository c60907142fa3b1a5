"""`Settings`, the model of all settings, and the catalogue of what each one accepts and how it is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self, cast, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, Field, SecretStr, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from settings.callbacks import CallbackSettings
from settings.engine import EngineSettings
from settings.fields import (
    BOOLEAN_FORMS,
    MASK,
    NONE_WORD,
    Accepted,
    SettingsGroup,
    Unit,
    mask_refused_url,
    mask_url,
    mask_userinfo,
    read_boolean,
    read_number,
    read_whole_number,
    show,
    write,
)
from settings.limits import LimitSettings
from settings.model import ModelSettings
from settings.observability import LogSettings, MetricsSettings, TracingSettings
from settings.redis import RedisSettings
from settings.serve import ServeSettings
from settings.worker import WorkerSettings

JsonValue = bool | int | float | str | None

_READERS: Mapping[type, Callable[[str], object]] = {
    bool: read_boolean,
    int: read_whole_number,
    float: read_number,
    Path: Path,
    SecretStr: SecretStr,
    str: str,
}


class Settings(BaseSettings):
    """All settings of one process, frozen.

    `load_settings` makes them from every source. `Settings(...)` reads neither environment nor files: it holds its
    arguments and otherwise the defaults, for tests and for use as a library.
    """

    model_config = SettingsConfigDict(frozen=True, extra="forbid", strict=True)

    model: ModelSettings = Field(default_factory=ModelSettings)
    redis: RedisSettings = Field(default_factory=RedisSettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    worker: WorkerSettings = Field(default_factory=WorkerSettings)
    limits: LimitSettings = Field(default_factory=LimitSettings)
    log: LogSettings = Field(default_factory=LogSettings)
    metrics: MetricsSettings = Field(default_factory=MetricsSettings)
    tracing: TracingSettings = Field(default_factory=TracingSettings)
    serve: ServeSettings = Field(default_factory=ServeSettings)
    callbacks: CallbackSettings = Field(default_factory=CallbackSettings)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The sources given to `read_from`; for `Settings(...)` only its arguments."""
        sources: tuple[PydanticBaseSettingsSource, ...] = init_settings().get("sources", (init_settings,))
        return sources

    @classmethod
    def read_from(cls, sources: tuple[PydanticBaseSettingsSource, ...]) -> Self:
        """The settings of `sources`, strongest first. Raises SettingsError, or ValidationError for a contradiction."""
        arguments: dict[str, Any] = {"sources": sources}
        return cls(**arguments)


@dataclass(frozen=True, slots=True)
class SettingSpec:
    """One setting: its dotted key, what it accepts, and how values are read and shown."""

    key: str
    kind: type  # bool, int, float, str, Path or SecretStr
    choices: tuple[str, ...]  # lower-case words; empty unless the setting is a choice
    optional: bool  # accepts none
    unit: str | None  # what a number counts, e.g. "tokens"
    accepted: str  # the accepted forms, in words
    description: str
    default: object
    adapter: TypeAdapter[object]  # checks type and bounds, strictly

    @property
    def secret(self) -> bool:
        """Whether the value may hold a password."""
        return self.kind is SecretStr

    def leaves_open(self, value: object) -> bool:
        """Whether a value leaves the decision to the engine: none, or the choice `auto`."""
        return value is None or (bool(self.choices) and value == "auto")

    def read(self, raw: object) -> object:
        """The typed value of what was written: text is read, other values (of TOML or Python) must have the right type.

        Raises ValueError where it is not accepted.
        """
        if isinstance(raw, str):
            raw = self._from_text(raw)
        elif self.kind is bool and type(raw) is int:
            # The text `1` is a boolean, so TOML's number 1 is one too.
            raw = read_boolean(str(raw))
        return self.check(raw)

    def check(self, value: object) -> object:
        """A typed value, if it is accepted; text is no number here. Raises ValueError."""
        try:
            return self.adapter.validate_python(value)
        except ValidationError:
            # pydantic's message quotes the value, which may be secret; `accepted` says what this one should be.
            raise ValueError("not accepted") from None

    def _from_text(self, text: str) -> object:
        if text == "":
            raise ValueError("empty")
        if self.optional and text.lower() == NONE_WORD:
            return None
        if self.choices:
            return text.lower()
        if "\0" in text:
            raise ValueError("holds a null byte")
        return _READERS[self.kind](text)

    def plain(self, value: object) -> JsonValue:
        """A typed value as JSON holds it: paths as text, passwords masked."""
        if isinstance(value, SecretStr):
            return mask_url(value.get_secret_value())
        if value is None or isinstance(value, bool | int | float | str):
            return value
        return str(value)

    def text(self, value: object) -> str:
        """A typed value as it would be written in the environment, passwords masked."""
        return write(self.plain(value))

    def show(self, raw: object) -> str:
        """What was written and not accepted, for an error line: on one line, passwords masked."""
        if isinstance(raw, SecretStr):
            raw = raw.get_secret_value()
        if not isinstance(raw, str):
            return MASK if self.secret else show(raw)
        return show(mask_refused_url(raw) if self.secret and raw else mask_userinfo(raw))


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


def _walk(model: type[BaseModel], prefix: str) -> Iterator[SettingSpec]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, SettingsGroup):
            yield from _walk(field.annotation, f"{prefix}{name}.")
        else:
            yield _spec(f"{prefix}{name}", field)


def _spec(key: str, field: FieldInfo) -> SettingSpec:
    annotation, optional, marks = _unwrap(field)
    choices = tuple(get_args(annotation)) if get_origin(annotation) is Literal else ()
    kind = str if choices else annotation
    if not isinstance(kind, type):
        raise TypeError(f"{key}: settings of type {annotation} are not supported")
    accepted = _accepted(kind, choices, marks)
    declared = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    return SettingSpec(
        key=key,
        kind=kind,
        choices=choices,
        optional=optional,
        unit=next((mark.name for mark in marks if isinstance(mark, Unit)), None),
        accepted=f"{accepted}, or {NONE_WORD}" if optional else accepted,
        description=field.description or "",
        default=field.get_default(),
        adapter=TypeAdapter(cast("type[object]", declared), config=SettingsGroup.model_config),
    )


def _unwrap(field: FieldInfo) -> tuple[object, bool, tuple[object, ...]]:
    """A field's type without `| None` and Annotated, whether None is accepted, and the marks of both places."""
    annotation: object = field.annotation
    marks = tuple(field.metadata)
    optional = type(None) in get_args(annotation)
    if optional:
        (annotation,) = [member for member in get_args(annotation) if member is not type(None)]
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
    """The range of a number, in words. Both ends must be declared: no setting takes what no machine can hold."""
    (high,) = [write(mark.le) for mark in marks if isinstance(mark, Le)]
    for mark in marks:
        if isinstance(mark, Ge):
            return f", {write(mark.ge)} to {high}"
    (above,) = [write(mark.gt) for mark in marks if isinstance(mark, Gt)]
    return f" above {above}, at most {high}"
