"""All settings of one process."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from settings.engine import EngineSettings
from settings.limits import LimitSettings
from settings.log import LogSettings
from settings.metrics import MetricsSettings
from settings.model import ModelSettings
from settings.redis import RedisSettings
from settings.source import ENV_DELIMITER, ENV_PREFIX
from settings.tracing import TracingSettings
from settings.worker import WorkerSettings


class Settings(BaseSettings):
    """All settings of one process, frozen.

    Made by `load_settings`. `Settings()` by itself is the defaults: it reads neither environment nor files, so a
    test or a library user gets what the arguments say.
    """

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", strict=True, env_prefix=ENV_PREFIX, env_nested_delimiter=ENV_DELIMITER
    )

    model: ModelSettings = Field(default_factory=ModelSettings)
    redis: RedisSettings = Field(default_factory=RedisSettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    worker: WorkerSettings = Field(default_factory=WorkerSettings)
    limits: LimitSettings = Field(default_factory=LimitSettings)
    log: LogSettings = Field(default_factory=LogSettings)
    metrics: MetricsSettings = Field(default_factory=MetricsSettings)
    tracing: TracingSettings = Field(default_factory=TracingSettings)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only the arguments: `load_settings` reads the rest, since these sources skip names they do not know."""
        return (init_settings,)
