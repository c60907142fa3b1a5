"""What generation_config.json says about ending a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.common_config import MAX_CONFIG_BYTES
from engine.checkpoint.config_reader import ConfigReader
from engine.checkpoint.json_file import read_json_object


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """The token ids that end a sequence; none means that only lengths and stop strings do."""

    eos_token_ids: frozenset[int]


def read_generation_config(path: Path) -> GenerationConfig:
    """Read generation_config.json of a model directory, or config.json where the former names no id.

    Sampling defaults in the file (temperature, top_p...) are not read: a request's parameters are its own.
    Raises CheckpointError naming file, key and value.
    """
    for name in ("generation_config.json", "config.json"):
        file = path / name
        if name == "config.json" or file.exists():
            config = ConfigReader(read_json_object(file, max_bytes=MAX_CONFIG_BYTES), name)
            if config.has("eos_token_id"):
                return GenerationConfig(_token_ids(config, "eos_token_id"))
    return GenerationConfig(frozenset())


def _token_ids(config: ConfigReader, key: str) -> frozenset[int]:
    if isinstance(config.data[key], list):
        return frozenset(config.integers(key))
    return frozenset({config.integer(key, minimum=0)})
