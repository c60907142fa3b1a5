"""Runs the forward passes of a decoder over its KV cache, and those of an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import structlog
import torch

from engine.errors import NonFiniteLogits
from engine.execution.batch import Draws, ForwardItem, PlannedBatch, fill_in, plan_batch
from engine.execution.decode_graphs import DecodeGraphs
from engine.execution.prefix_groups import DECODE_GATE, PREFILL_GATE
from engine.execution.profile import ObservedPasses, PassTrace
from engine.kv_cache.tensors import KVCacheTensors
from engine.models.decoder import DecoderModel, ForwardResult, LayerObserver
from engine.models.encoder import EncoderModel
from engine.staging import ArrayStaging
from engine.stats import DecodeGraphStats
from settings import EngineSettings

_log = structlog.get_logger(__name__)
TRACED_CANDIDATES = 5

WARM_UP_TOKEN = 0  # a valid id in every vocabulary


class StepExecutor:
    """Runs a decoder's forward passes; traces and profiles those that the settings select."""

    def __init__(
        self,
        model: DecoderModel,
        kv_cache: KVCacheTensors,
        settings: EngineSettings,
        pass_trace: PassTrace | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """graphs: over the same model and KV cache; None: every step runs eagerly."""
        self.model = model
        self.kv_cache = kv_cache
        self._settings = settings
        self._passes = ObservedPasses(len(model.layers), model.device, settings, pass_trace)
        self._staging = ArrayStaging(model.device)
        self._graphs = graphs
        self._gates = (DECODE_GATE, PREFILL_GATE) if settings.shared_prefix.enabled else None

    def execute(
        self, items: Sequence[ForwardItem], chosen: torch.Tensor | None = None, draws: Draws | None = None
    ) -> ForwardResult:
        """Run the items in one forward pass. chosen [S] int64: what the step before chose, for items with a
        `pending_token` of it. draws: of the items; a graph that replays them chooses their tokens and leaves no logits.

        A step that only decodes runs a sequence at a time where it has fewer than `engine.decode.batch_threshold`, or
        `engine.decode.batched` is off. Where decode graphs replay a step, its logits last until the next step.
        """
        if not items:
            return ForwardResult(torch.empty((0, self.model.config.vocab_size), device=self.model.device), ())
        is_decode = all(len(item.token_ids) == 1 for item in items)
        decode = self._settings.decode
        is_batched = decode.batched and len(items) >= decode.batch_threshold
        if is_decode and len(items) > 1 and not is_batched:
            logits, hidden = zip(*(self._run_alone(item, chosen) for item in items), strict=True)
            return ForwardResult(torch.cat(logits), tuple(chain.from_iterable(hidden)))
        return self._forward(items, chosen, draws)

    @property
    def chooses_tokens(self) -> bool:
        """Whether some steps choose their tokens themselves, if they are given draws."""
        return self._graphs is not None

    def never_choose(self, unknown_ids: torch.Tensor) -> None:
        """Keep these ids [U] int64 out of every choice from now on."""
        if self._graphs is not None:
            self._graphs.never_choose(unknown_ids)

    def capture_graphs(self) -> None:
        """Capture the decode graphs that were not tried yet: at start, before the first step."""
        if self._graphs is not None:
            self._graphs.capture_all()

    @property
    def graph_stats(self) -> DecodeGraphStats | None:
        """Figures of the decode graphs; None without any."""
        return None if self._graphs is None else self._graphs.stats()

    @property
    def num_forward_passes(self) -> int:
        """Forward passes so far."""
        return self._passes.num_passes

    def _run_alone(
        self, item: ForwardItem, chosen: torch.Tensor | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        result = self._forward([item], chosen)
        return result.logits.clone(), result.hidden  # a replay for the next item would write the same logits

    def _forward(
        self, items: Sequence[ForwardItem], chosen: torch.Tensor | None, draws: Draws | None = None
    ) -> ForwardResult:
        # On a GPU it would be launches that the warm-up has not compiled, and no GPU has measured it.
        narrows = self.model.device.type == "cpu" and self._graphs is None
        planned = plan_batch(items, self.kv_cache.spec.block_size, self._gates, narrows=narrows)
        if self._settings.trace_steps:
            self._trace(items)
        number = self.num_forward_passes
        if self._settings.trace_tokens:
            draws = None  # a graph that chooses tokens keeps no logits
        result = self._passes.run(
            lambda observer: self._run(planned, chosen, draws, observer),
            num_tokens=planned.num_tokens,
            num_seqs=len(items),
        )
        if self._settings.trace_tokens:
            self._trace_candidates(number, result.logits)
        return result

    def _run(
        self,
        planned: PlannedBatch,
        chosen: torch.Tensor | None,
        draws: Draws | None,
        observer: LayerObserver | None,
    ) -> ForwardResult:
        """Replay a graph where one serves the step, unless an observer is to see the layers one by one."""
        if self._graphs is not None and observer is None:
            replayed = self._graphs.replay(planned, chosen, draws)
            if replayed is not None:
                return replayed
        batch = planned.on_device(self._staging.send(planned.arrays))
        if chosen is not None:
            fill_in(batch.token_ids, chosen)
        return self.model.forward(batch, self.kv_cache, observer)

    def _trace(self, items: Sequence[ForwardItem]) -> None:
        _log.info(
            "step",
            forward_pass=self.num_forward_passes,
            num_seqs=len(items),
            lens=[len(item.token_ids) for item in items],
            positions=[item.start for item in items],
            finals=[item.is_final for item in items],
        )

    def _trace_candidates(self, number: int, logits: torch.Tensor) -> None:
        """Log the best candidates of each row; NaN counts as worst, and the vocabulary may be smaller than five."""
        safe = torch.nan_to_num(logits.float(), nan=-torch.inf)
        values, token_ids = safe.topk(min(TRACED_CANDIDATES, safe.shape[-1]))
        _log.info("candidates", forward_pass=number, token_ids=token_ids.tolist(), logits=values.tolist())


def check_warm_up(hidden: torch.Tensor) -> None:
    """Raise NonFiniteLogits unless the hidden states [1, H] of the warm-up token are numbers."""
    if not bool(torch.isfinite(hidden).all()):
        raise NonFiniteLogits("the hidden states of the warm-up token are not finite")


class EncoderExecutor:
    """Runs an encoder's forward passes; traces and profiles those that the settings select."""

    def __init__(self, model: EncoderModel, settings: EngineSettings, pass_trace: PassTrace | None = None) -> None:
        self.model = model
        self._passes = ObservedPasses(model.config.num_layers, model.device, settings, pass_trace)
        self._trace_steps = settings.trace_steps

    def warm_up(self) -> None:
        """Run one token. Raises NonFiniteLogits if that answers NaN."""
        check_warm_up(*self.execute([[WARM_UP_TOKEN]]))

    def execute(
        self, sequences: Sequence[Sequence[int]], second_starts: Sequence[int] = ()
    ) -> tuple[torch.Tensor, ...]:
        """The hidden states [n, H] of the last layer for each sequence of n token ids, none of them empty.

        second_starts: for each, where the tokens of a pair's second text begin; left out: there are no pairs.
        """
        tokens = self.model.pack(sequences, second_starts)
        lens = list(tokens.lengths)
        if self._trace_steps:
            _log.info("step", forward_pass=self._passes.num_passes, num_seqs=len(lens), lens=lens)
        hidden = self._passes.run(
            lambda observer: self.model.forward(tokens, observer), num_tokens=sum(lens), num_seqs=len(lens)
        )
        return torch.split(hidden, lens)
