"""Names for the stages of a forward pass in a trace."""

from __future__ import annotations

from contextlib import ExitStack

from torch.profiler import record_function

from engine.models.layer_observer import LayerObserver


class LayerRanges:
    """A LayerObserver that puts each stage into a range: "embedding", "layer 0" and on, "logits".

    The first begins when this is made. `inner`, where there is one, is told inside the range: what it waits for counts.
    """

    def __init__(self, num_layers: int, inner: LayerObserver | None) -> None:
        self._num_layers = num_layers
        self._inner = inner
        self._range = ExitStack()  # holds the one that is open
        self._range.enter_context(record_function("embedding"))

    def after(self, index: int) -> None:
        """End the stage, begin the next."""
        if self._inner is not None:
            self._inner.after(index)
        self._range.close()
        if index < self._num_layers:
            name = "logits" if index + 1 == self._num_layers else f"layer {index + 1}"
            self._range.enter_context(record_function(name))
