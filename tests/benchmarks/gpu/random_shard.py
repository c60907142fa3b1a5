"""Weights that are drawn on the device when they are read."""

from __future__ import annotations

import math
import zlib
from pathlib import Path

import torch

from engine.checkpoint.files import Checkpoint, Shard
from engine.checkpoint.model_config import ModelConfig
from engine.models.placement import DTYPES
from tests.benchmarks.gpu.weight_shapes import weight_shapes

STANDARD_DEVIATION = 0.02  # what published models are initialised with


class RandomShard(Shard):
    """In place of a file: nothing is written, downloaded or copied from the host. A tensor is a function of its name.

    The loader copies expert by expert and layer by layer, so at no time a second copy of the weights exists.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.path = Path("random weights")
        self._dtype = DTYPES[config.dtype]
        self._device = device
        self._shapes = weight_shapes(config)
        self.data_bytes = sum(math.prod(shape) for shape in self._shapes.values()) * self._dtype.itemsize

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype

    def read(self, name: str) -> torch.Tensor:
        """Matrices around 0; the weights of norms, which are vectors, around 1."""
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        shape = self._shapes[name]
        mean = 1.0 if len(shape) == 1 else 0.0
        drawn = torch.empty(shape, dtype=self._dtype, device=self._device)
        return drawn.normal_(mean, STANDARD_DEVIATION, generator=generator)

    def close(self) -> None:
        """Nothing is open."""


def random_checkpoint(config: ModelConfig, device: torch.device) -> Checkpoint:
    """All weights of a model, as the loader takes them."""
    shard = RandomShard(config, device)
    return Checkpoint(dict.fromkeys(sorted(shard.names()), shard))
