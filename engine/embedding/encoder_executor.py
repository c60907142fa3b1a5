"""Runs an encoder's forward passes."""

from __future__ import annotations

from collections.abc import Sequence

import structlog
import torch

from engine.errors import NonFiniteLogits
from engine.execution.observed_passes import ObservedPasses
from engine.execution.pass_trace import PassTrace
from engine.models.encoder_model import EncoderModel
from engine.models.packed_tokens import PackedTokens
from settings import EngineSettings

WARM_UP_TOKEN = 0  # a valid id in every vocabulary

_log = structlog.get_logger(__name__)


class EncoderExecutor:
    """Runs forward passes; traces and profiles the steps that the settings select."""

    def __init__(self, model: EncoderModel, settings: EngineSettings, pass_trace: PassTrace | None = None) -> None:
        self.model = model
        self._passes = ObservedPasses(model.config.num_layers, model.device, settings, pass_trace)
        self._trace_steps = settings.trace_steps

    def warm_up(self) -> None:
        """Run one token. Raises NonFiniteLogits if that answers NaN."""
        (hidden,) = self.execute([[WARM_UP_TOKEN]])
        if not bool(torch.isfinite(hidden).all()):
            raise NonFiniteLogits("the hidden states of the warm-up token are not finite")

    def execute(self, sequences: Sequence[Sequence[int]]) -> tuple[torch.Tensor, ...]:
        """The hidden states [n, H] of the last layer for each sequence of n token ids, none of them empty."""
        tokens = PackedTokens.of(sequences, self.model.device)
        lens = list(tokens.lengths)
        if self._trace_steps:
            _log.info("step", forward_pass=self._passes.num_passes, num_seqs=len(lens), lens=lens)
        hidden = self._passes.run(
            lambda observer: self.model.forward(tokens, observer), num_tokens=sum(lens), num_seqs=len(lens)
        )
        return torch.split(hidden, lens)
