"""Who is told when a layer has run."""

from __future__ import annotations

from typing import Protocol


class LayerObserver(Protocol):
    """Told after the embedding (-1), after each layer (its index) and after the logits (num_layers)."""

    def after(self, index: int) -> None:
        """Stage `index` has been launched."""
        ...
