"""The forward passes of a model, as its settings want them watched."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

import structlog
import torch

from engine.execution.layer_ranges import LayerRanges
from engine.execution.layer_timer import LayerTimer
from engine.execution.pass_trace import PassTrace
from engine.models.layer_observer import LayerObserver
from settings import EngineSettings

_log = structlog.get_logger(__name__)
R = TypeVar("R")


class ObservedPasses:
    """Runs forward passes, counts them, and times and traces those that engine.profile selects."""

    def __init__(
        self, num_layers: int, device: torch.device, settings: EngineSettings, pass_trace: PassTrace | None
    ) -> None:
        self._num_layers = num_layers
        self._device = device
        self._settings = settings
        self._pass_trace = pass_trace
        self.num_passes = 0

    def run(self, forward: Callable[[LayerObserver | None], R], *, num_tokens: int, num_seqs: int) -> R:
        """What `forward` returns; it is given whom to tell about its layers."""
        if self._settings.profile.selects(self.num_passes, num_tokens, num_seqs):
            result = self._profiled(forward, num_tokens, num_seqs)
        else:
            result = forward(None)
        self.num_passes += 1
        return result

    def _profiled(self, forward: Callable[[LayerObserver | None], R], num_tokens: int, num_seqs: int) -> R:
        trace = self._pass_trace if self._pass_trace is not None and self._pass_trace.has_room else None
        name = f"forward pass {self.num_passes} (num_tokens={num_tokens}, num_seqs={num_seqs})"
        with nullcontext() if trace is None else trace.record(name, self._device):
            timer = LayerTimer(self._device) if self._settings.profile.layers else None
            observer = timer if trace is None else LayerRanges(self._num_layers, timer)
            result = forward(observer)
        if timer is not None:
            _log.info(
                "layer_profile",
                forward_pass=self.num_passes,
                num_tokens=num_tokens,
                num_seqs=num_seqs,
                stages_ms={str(stage): round(ms, 3) for stage, ms in timer.stages_ms.items()},
            )
        return result
