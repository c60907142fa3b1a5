"""Runs forward passes on the model and its KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import structlog
import torch

from engine.execution.build_forward_batch import build_forward_batch
from engine.execution.forward_batch import ForwardBatch
from engine.execution.forward_item import ForwardItem
from engine.execution.layer_ranges import LayerRanges
from engine.execution.layer_timer import LayerTimer
from engine.execution.pass_trace import PassTrace
from engine.execution.shared_prefix_gate import DECODE_GATE, PREFILL_GATE
from engine.kv_cache.kv_cache_tensors import KVCacheTensors
from engine.models.decoder_model import DecoderModel
from settings import EngineSettings

_log = structlog.get_logger(__name__)
TRACED_CANDIDATES = 5


class StepExecutor:
    """Runs forward passes; traces and profiles the steps that the settings select."""

    def __init__(
        self,
        model: DecoderModel,
        kv_cache: KVCacheTensors,
        settings: EngineSettings,
        pass_trace: PassTrace | None = None,
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self._settings = settings
        self._pass_trace = pass_trace
        self._gates = (DECODE_GATE, PREFILL_GATE) if settings.shared_prefix.enabled else None
        self.num_forward_passes = 0

    def execute(self, items: Sequence[ForwardItem]) -> torch.Tensor:
        """Run the items. Returns the logits [S, V] float32 of those that want them, in order.

        One forward pass, but for a pure decode below `engine.decode.batch_threshold`, or with `engine.decode.batched`
        off: these run a sequence at a time (seeds A7). The shape of the answer is the same.
        """
        if not items:
            return torch.empty((0, self.model.config.vocab_size), device=self.model.device)
        is_decode = all(len(item.token_ids) == 1 for item in items)
        decode = self._settings.decode
        if is_decode and not (decode.batched and len(items) >= decode.batch_threshold):
            return torch.cat([self._forward([item]) for item in items])
        return self._forward(items)

    def _forward(self, items: Sequence[ForwardItem]) -> torch.Tensor:
        batch = build_forward_batch(items, self.kv_cache.spec.block_size, self.model.device, self._gates)
        if self._settings.trace_steps:
            self._trace(items)
        if self._settings.profile.selects(self.num_forward_passes, batch.num_tokens, len(items)):
            logits = self._profiled(batch, len(items))
        else:
            logits = self.model.forward(batch, self.kv_cache)
        if self._settings.trace_tokens:
            self._trace_candidates(logits)
        self.num_forward_passes += 1
        return logits

    def _profiled(self, batch: ForwardBatch, num_seqs: int) -> torch.Tensor:
        device = self.model.device
        trace = self._pass_trace if self._pass_trace is not None and self._pass_trace.has_room else None
        name = f"forward pass {self.num_forward_passes} (num_tokens={batch.num_tokens}, num_seqs={num_seqs})"
        with nullcontext() if trace is None else trace.record(name, device):
            timer = LayerTimer(device) if self._settings.profile.layers else None
            observer = timer if trace is None else LayerRanges(len(self.model.layers), timer)
            logits = self.model.forward(batch, self.kv_cache, observer)
        if timer is not None:
            _log.info(
                "layer_profile",
                forward_pass=self.num_forward_passes,
                num_tokens=batch.num_tokens,
                num_seqs=num_seqs,
                stages_ms={str(stage): round(ms, 3) for stage, ms in timer.stages_ms.items()},
            )
        return logits

    def _trace(self, items: Sequence[ForwardItem]) -> None:
        _log.info(
            "step",
            forward_pass=self.num_forward_passes,
            num_seqs=len(items),
            lens=[len(item.token_ids) for item in items],
            positions=[item.start for item in items],
            finals=[item.is_final for item in items],
        )

    def _trace_candidates(self, logits: torch.Tensor) -> None:
        """The best candidates of each row. NaN counts as worst, a small vocabulary is fine (seeds E7)."""
        safe = torch.nan_to_num(logits, nan=-torch.inf)
        values, token_ids = safe.topk(min(TRACED_CANDIDATES, safe.shape[-1]))
        _log.info(
            "candidates", forward_pass=self.num_forward_passes, token_ids=token_ids.tolist(), logits=values.tolist()
        )
