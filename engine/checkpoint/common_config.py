"""What is read alike in config.json of a decoder and of an encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, cast

from engine.checkpoint.config_reader import ConfigReader

DtypeName = Literal["float32", "bfloat16", "float16"]

DTYPES = ("float32", "bfloat16", "float16")
MAX_CONFIG_BYTES = 1 << 20  # published configuration files are below 10 KB


def weights_dtype(config: ConfigReader, *, default: DtypeName | None = None) -> DtypeName:
    """That of the weights on disk. Raises CheckpointError for another, or none where there is no default."""
    return cast(DtypeName, config.choice(config.first_of("dtype", "torch_dtype"), DTYPES, default=default))


def refuse_unsupported(config: ConfigReader, *, absent: Mapping[str, str], false: Sequence[str]) -> None:
    """Raises CheckpointError for a key of `absent` (key -> what is accepted) that is there, one of `false` that is not
    false.
    """
    for key, accepted in absent.items():
        if config.has(key):
            raise config.refuse(key, config.data[key], accepted)
    for key in false:
        if config.flag(key, default=False):
            raise config.refuse(key, True, "false")
