"""Layers that are in memory one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from engine.models.decoder_layer import DecoderLayer


class StreamedLayers:
    """Layers loaded when a forward pass comes to them and dropped when it goes on: for one pass over a whole model."""

    def __init__(self, load: Callable[[int], DecoderLayer], num_layers: int) -> None:
        """load: index -> layer."""
        self._load = load
        self._num_layers = num_layers

    def __len__(self) -> int:
        return self._num_layers

    def __iter__(self) -> Iterator[DecoderLayer]:
        return map(self._load, range(self._num_layers))
