"""Decode steps captured once and replayed."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence

import structlog
import torch

from engine.execution.decode_buffers import DecodeBuffers
from engine.execution.decode_graph_stats import DecodeGraphStats
from engine.execution.graph_backend import DecodeRun, GraphBackend
from engine.execution.planned_batch import PlannedBatch
from engine.kv_cache.kv_cache_tensors import KVCacheTensors
from engine.models.decoder_model import DecoderModel
from engine.out_of_memory import is_out_of_memory

_log = structlog.get_logger(__name__)


class DecodeGraphs:
    """One graph a batch size over one set of buffers; a step runs in the smallest that holds its rows.

    Made with the model and kept as long as it: a replay may be queued at any time, so nothing here drops a graph or
    moves a buffer (seeds A12, B1).
    """

    def __init__(
        self,
        model: DecoderModel,
        kv_cache: KVCacheTensors,
        backend: GraphBackend,
        batch_sizes: Sequence[int],
        max_model_len: int,
    ) -> None:
        """Allocates the buffers and captures nothing yet. max_model_len: most tokens of a row."""
        largest = max(batch_sizes)
        self._model = model
        self._kv_cache = kv_cache
        self._backend = backend
        self._max_model_len = max_model_len
        self._buffers = DecodeBuffers(largest, -(-max_model_len // kv_cache.spec.block_size), model.device)
        self._logits = torch.zeros((largest, model.config.vocab_size), dtype=torch.float32, device=model.device)
        self._untried = sorted(set(batch_sizes))
        self._captured: dict[int, DecodeRun] = {}
        self._failed: list[int] = []
        self._num_replays = 0
        self._num_eager_decode_steps = 0

    def capture_all(self) -> None:
        """Capture every size that was not tried yet, the largest first: the others fit into the memory it took.

        Runs each, over padding alone. A size that cannot be captured is logged and never tried again; its steps run in
        a larger graph or eagerly. Must not run while a step does. Raises what `is_out_of_memory` knows,
        and EngineFatal where the device failed.
        """
        started_s = time.monotonic()
        if not self._untried:
            return
        while self._untried:
            self._capture(self._untried.pop())
        _log.info(
            "decode_graphs_captured",
            batch_sizes=list(self.stats().captured_sizes),
            failed_sizes=list(self.stats().failed_sizes),
            duration_s=round(time.monotonic() - started_s, 3),
        )

    def replay(self, planned: PlannedBatch, chosen: torch.Tensor | None = None) -> torch.Tensor | None:
        """Logits [num_rows, V] float32 of a decode step, in the order of its items; None: to be run eagerly.

        The logits are a view of one buffer that every replay writes. What reads them on the same stream before the next
        replay, as the sampler does, is ordered by the stream; what is to last longer must be copied.

        chosen: see `StepExecutor.execute`.
        """
        if planned.prefill is not None:
            return None
        sizes = sorted(self._captured)
        place = bisect_left(sizes, planned.num_tokens)
        if not planned.is_plain_decode or place == len(sizes) or planned.decode is None:
            self._num_eager_decode_steps += 1
            return None
        size = sizes[place]
        self._buffers.fill(planned, size, chosen)
        kv_lens = planned.decode.seq_lens.tolist()
        self._captured[size]((*kv_lens, *[1] * (size - len(kv_lens))))
        self._num_replays += 1
        return self._logits[: len(kv_lens)]

    def stats(self) -> DecodeGraphStats:
        """Counters since the model was loaded."""
        return DecodeGraphStats(
            captured_sizes=tuple(sorted(self._captured)),
            failed_sizes=tuple(sorted(self._failed)),
            num_replays=self._num_replays,
            num_eager_decode_steps=self._num_eager_decode_steps,
        )

    def _capture(self, size: int) -> None:
        try:
            self._captured[size] = self._backend.capture(self._run, (self._max_model_len,) * size)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise  # eager steps would run out as well, later
            self._failed.append(size)
            _log.warning("decode_graph_capture_failed", batch_size=size, error=f"{type(error).__name__}: {error}")

    def _run(self, kv_lens: tuple[int, ...]) -> None:
        batch = self._buffers.batch(kv_lens)
        self._model.forward(batch, self._kv_cache, logits_out=self._logits[: len(kv_lens)])
