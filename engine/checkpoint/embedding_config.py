"""Reads how hidden states become vectors (pooling, dimensions), from the files of sentence-transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.checkpoint.config_reader import MAX_CONFIG_BYTES, ConfigReader, read_json_object
from engine.checkpoint.encoder_config import EncoderConfig
from engine.checkpoint.files import MODULES_FILE, read_modules
from engine.checkpoint.model_config import ModelConfig
from engine.errors import CheckpointError

Pooling = Literal["mean", "last_token", "cls"]

# sentence-transformers' switches (before version 5.2) and names (`pooling_mode`, since) of what is pooled here.
_SWITCHES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last_token",
}
_NAMES: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last_token"}
_OTHER_SWITCHES = (
    "pooling_mode_max_tokens",
    "pooling_mode_mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens",
)
_ACCEPTED = "exactly one of cls, mean and lasttoken"


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """What is pooled, and which lengths a vector may be cut to."""

    pooling: Pooling
    size: int  # elements of a whole vector: the model's hidden size
    dimensions: Sequence[int]  # lengths that a request may ask for, rising; the last is `size`
    padding_id: int | None = None  # a token that is not taken for a text's last one; None: the last one is
    is_declared: bool = False  # whether sentence-transformers' files make it a model for embeddings

    @classmethod
    def from_directory(cls, path: Path, *, size: int, default: Pooling) -> EmbeddingConfig:
        """Read sentence-transformers' files of a model directory and the Matryoshka keys of config.json.

        default: the pooling of a checkpoint without such files. The keys are `is_matryoshka` (any length) and
        `matryoshka_dimensions` (these lengths), as vLLM reads them. Raises CheckpointError for a module or a pooling
        that is not supported.
        """
        config = ConfigReader(read_json_object(path / "config.json", max_bytes=MAX_CONFIG_BYTES), "config.json")
        is_declared = (path / MODULES_FILE).exists()
        return cls(_pooling(path, default), size, _dimensions(config, size), is_declared=is_declared)

    @property
    def needs_every_position(self) -> bool:
        """Whether the hidden states of all tokens count, so that none may come from the prefix cache."""
        return self.pooling != "last_token"

    @property
    def dimensions_text(self) -> str:
        """`dimensions` in words."""
        if isinstance(self.dimensions, range):
            return f"1 to {self.size}"
        if len(self.dimensions) > 1:
            return ", ".join(map(str, self.dimensions))
        return f"{self.size}, or none: config.json says neither is_matryoshka nor matryoshka_dimensions"


def read_pooling(path: Path, config: ModelConfig | EncoderConfig) -> EmbeddingConfig:
    """What is pooled of the model in directory `path`: for a classification head what transformers gives it, else what
    sentence-transformers' files say, and without them the mean of an encoder, the last token of a decoder.

    Raises CheckpointError.
    """
    is_encoder, size = isinstance(config, EncoderConfig), config.hidden_size
    if config.classifier is not None:
        padding_id = None if is_encoder else config.classifier.padding_id
        pooling: Pooling = config.head_pooling if isinstance(config, EncoderConfig) else "last_token"
        return EmbeddingConfig(pooling, size, (size,), padding_id)
    return EmbeddingConfig.from_directory(path, size=size, default="mean" if is_encoder else "last_token")


def _dimensions(config: ConfigReader, size: int) -> Sequence[int]:
    named = config.integers("matryoshka_dimensions", minimum=1)
    if named:
        if max(named) > size:
            raise config.refuse("matryoshka_dimensions", named, f"numbers up to hidden_size ({size})")
        return tuple(sorted({*named, size}))
    return range(1, size + 1) if config.flag("is_matryoshka", default=False) else (size,)


def _pooling(path: Path, default: Pooling) -> Pooling:
    """The pooling of the Pooling module. Every vector is normalised here, so a Normalize module adds nothing."""
    file, pooling = path / MODULES_FILE, default
    for module in read_modules(path):
        kind = str(module.get("type")).rpartition(".")[2]
        if kind == "Pooling":
            pooling = _configured(path / str(module.get("path")) / "config.json", path)
        elif kind not in ("Transformer", "Normalize"):
            raise CheckpointError(
                f"{file}: type is {module.get('type')!r}; accepted: Transformer, Pooling and Normalize modules"
            )
    return pooling


def _configured(file: Path, directory: Path) -> Pooling:
    if not file.resolve().is_relative_to(directory.resolve()):
        raise CheckpointError(f"{directory / MODULES_FILE}: leads to {file}; accepted: a folder of this directory")
    config = ConfigReader(read_json_object(file, max_bytes=MAX_CONFIG_BYTES), f"{file.parent.name}/config.json")
    if config.has("pooling_mode"):
        return _NAMES[config.choice("pooling_mode", tuple(_NAMES))]
    chosen = [name for name in (*_SWITCHES, *_OTHER_SWITCHES) if config.flag(name, default=False)]
    if len(chosen) != 1 or chosen[0] not in _SWITCHES:
        raise config.refuse("pooling", chosen, _ACCEPTED)
    return _SWITCHES[chosen[0]]
