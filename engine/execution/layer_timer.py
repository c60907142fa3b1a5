"""Wall time of each layer of one step."""

from __future__ import annotations

import time

import torch


class LayerTimer:
    """A LayerObserver that waits for the device after each stage: exact, and slower. For selected steps only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last_s = self._now_s()
        self.stages_ms: dict[int, float] = {}  # -1: embedding, then the layers, then the logits

    def after(self, index: int) -> None:
        """Note the time since the stage before."""
        now_s = self._now_s()
        self.stages_ms[index] = (now_s - self._last_s) * 1e3
        self._last_s = now_s

    def _now_s(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
