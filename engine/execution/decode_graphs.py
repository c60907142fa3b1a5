"""Captures steps once, as CUDA graphs of fixed sizes, and replays them: of decode rows, and of these and chunks."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np
import structlog
import torch

from engine.errors import EngineFatal
from engine.execution.batch import ChunkBuffers, Draws, DrawTensors, GraphKind, PlannedBatch, fill_in
from engine.kv_cache.tensors import KVCacheTensors
from engine.models.decoder import DecoderModel, ForwardBatch, ForwardResult
from engine.out_of_memory import is_out_of_memory
from engine.staging import StagingBuffer
from engine.stats import DecodeGraphStats
from kernels.operands import AttentionRows, Truncation
from settings import EngineSettings

_log = structlog.get_logger(__name__)

# Steps of a hundred rows and more keep a GPU busy for milliseconds; the launches saved no longer count beyond this.
MAX_DEFAULT_SIZE = 512

# A capture knows only a bound of the lengths. Up to this one attention splits no row where there are enough of them
# (`kernels.triton.attention_launch`): no room for parts and no merge. Longer rows have graphs of their own.
SHORT_ROW_TOKENS = 8192

LEAST_CHUNK_TOKENS = 256
CHUNK_ROWS = (16, 64, 256)  # decode rows beside chunks: fewer sizes, since their padding is little beside the chunks

# Runs a step over static buffers; told the lengths of its rows, tokens in KV after the step. Where it has chunks, their
# numbers of queries and their lengths follow.
DecodeRun = Callable[[tuple[int, ...]], None]


class CapturedStep(NamedTuple):
    """A step in two parts, of which the second may be left out."""

    run: DecodeRun
    keep_logits: Callable[[], None]  # copies the logits that `run` has left in the memory of its graph


class DecodeGraphs:
    """One graph a batch size, and further ones where rows may be long, all over one set of buffers; a step runs in the
    smallest graph that its rows fit into.

    Lives as long as the model. Nothing here drops a graph or moves a buffer: a replay may be queued at any time.
    """

    def __init__(
        self,
        model: DecoderModel,
        kv_cache: KVCacheTensors,
        backend: GraphBackend,
        batch_sizes: Sequence[int],
        max_model_len: int,
        chunk_sizes: Sequence[int] = (),
    ) -> None:
        """Allocates the buffers and captures nothing yet. max_model_len: most tokens of a row; chunk_sizes: numbers of
        tokens of all chunks of a step.
        """
        self._untried = graph_kinds(batch_sizes, max_model_len, chunk_sizes)
        largest = max(kind.num_choices for kind in self._untried)
        self._model = model
        self._kv_cache = kv_cache
        self._backend = backend
        max_blocks = -(-max_model_len // kv_cache.spec.block_size)
        self._buffers = DecodeBuffers(max(batch_sizes), max_blocks, model.device)
        with_chunks = [kind for kind in self._untried if kind.chunk_tokens]
        self._chunk_buffers = ChunkBuffers(with_chunks, max_blocks, model.device) if with_chunks else None
        vocab_size = model.config.vocab_size
        self._logits = torch.zeros((largest, vocab_size), dtype=model.dtype, device=model.device)
        self._chosen = torch.zeros((2, largest), dtype=torch.int64, device=model.device)
        self._is_known = torch.ones(vocab_size, dtype=torch.bool, device=model.device)
        self._computed = self._logits[:0]  # by the run before; a graph's, while it is captured
        self._captured: dict[GraphKind, CapturedStep] = {}
        self._failed: list[int] = []
        self._num_replays = self._num_chunk_replays = 0
        self._num_eager_decode_steps = 0

    def capture_all(self) -> None:
        """Capture every size that was not tried yet, the largest first: the others fit into the memory it took.

        Runs each, over padding alone, and must not run while a step does. A size that cannot be captured is logged and
        never tried again; its steps run in a larger graph or eagerly. Raises what `is_out_of_memory` knows, and
        EngineFatal where the device failed.
        """
        started_s = time.monotonic()
        if not self._untried:
            return
        with _no_garbage_collection():
            while self._untried:
                self._capture(self._untried.pop())
        _log.info(
            "decode_graphs_captured",
            batch_sizes=list(self.stats().captured_sizes),
            failed_sizes=list(self.stats().failed_sizes),
            duration_s=round(time.monotonic() - started_s, 3),
        )

    def never_choose(self, unknown_ids: torch.Tensor) -> None:
        """Keep these ids [U] int64 out of every choice from now on."""
        self._is_known.index_fill_(0, unknown_ids, False)

    def replay(
        self, planned: PlannedBatch, chosen: torch.Tensor | None = None, draws: Draws | None = None
    ) -> ForwardResult | None:
        """Logits [num_rows, V] of a step, in the order of its items, or, where draws are given, the tokens that they
        choose, and no logits; None: to be run eagerly.

        Both are views of buffers that replays write. They are read on the same stream before the next replay;
        what is to last longer must be copied. chosen, draws: see `StepExecutor.execute`.
        """
        kind = self._smallest(planned)
        if kind is None:
            self._num_eager_decode_steps += planned.prefill is None
            return None
        is_own = chosen is not None and chosen.data_ptr() == self._chosen.data_ptr()  # the graph itself fills them in
        others, rows = None if is_own else chosen, int(planned.logits_indices.shape[0])
        if kind.chunk_tokens and self._chunk_buffers is not None:
            lens = self._chunk_buffers.fill(planned, kind, others, draws)
        else:
            lens = self._buffers.fill(planned, kind.num_rows, others, draws)
        step = self._captured[kind]
        step.run(lens)
        self._num_replays += 1
        self._num_chunk_replays += kind.chunk_tokens > 0
        if draws is not None:
            return ForwardResult(self._logits[:0], (), self._chosen[:, :rows])
        step.keep_logits()
        return ForwardResult(self._logits[:rows], ())

    def stats(self) -> DecodeGraphStats:
        """Counters since the model was loaded."""
        return DecodeGraphStats(
            captured_sizes=tuple(sorted({kind.num_rows for kind in self._captured if not kind.chunk_tokens})),
            failed_sizes=tuple(sorted(set(self._failed))),
            num_replays=self._num_replays,
            num_eager_decode_steps=self._num_eager_decode_steps,
            captured_chunk_tokens=tuple(sorted({kind.chunk_tokens for kind in self._captured} - {0})),
            num_chunk_replays=self._num_chunk_replays,
        )

    def _smallest(self, planned: PlannedBatch) -> GraphKind | None:
        if not planned.is_plain:
            return None
        rows, chunks = ((0, 0) if part is None else (part.seq_lens.shape[0], int(part.seq_lens.max()))
                        for part in (planned.decode, planned.prefill))  # fmt: skip
        wanted = GraphKind(planned.num_tokens - rows[0], rows[0], max(rows[1], chunks[1]))
        holding = (kind for kind in self._captured if kind.holds(wanted, chunks[0]))
        return min(holding, key=lambda kind: (kind.num_tokens, kind.row_tokens), default=None)

    def _capture(self, kind: GraphKind) -> None:
        if kind.chunk_tokens and self._chunk_buffers is not None:
            self._chunk_buffers.clear(kind)
        try:
            run = self._backend.capture(lambda lens: self._run(kind, lens), kind.lens)
            keep_logits = self._backend.capture_after(lambda: self._keep_logits(kind.num_choices))
            self._captured[kind] = CapturedStep(run, keep_logits)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise  # eager steps would run out as well, later
            if not kind.chunk_tokens:
                self._failed.append(kind.num_rows)
            _log.warning(
                "decode_graph_capture_failed",
                batch_size=kind.num_rows,
                chunk_tokens=kind.chunk_tokens,
                row_tokens=kind.row_tokens,
                error=f"{type(error).__name__}: {error}",
            )
        finally:
            self._computed = self._logits[:0]  # what it took of the graphs' memory is free for the next

    @torch.inference_mode()
    def _run(self, kind: GraphKind, lens: tuple[int, ...]) -> None:
        size = kind.num_choices
        if kind.chunk_tokens and self._chunk_buffers is not None:
            batch, draws = self._chunk_buffers.batch(kind, lens), self._chunk_buffers.draws(size)
        else:
            batch, draws = self._buffers.batch(lens), self._buffers.draws(size)
        fill_in(batch.token_ids[: kind.num_rows], self._chosen[0])
        self._computed = self._model.forward(batch, self._kv_cache).logits
        # Logits are unchanged where none is drawn.
        chosen = self._model.ops.choose_tokens(self._computed, self._is_known, *draws)
        self._chosen[:, :size].copy_(chosen)

    @torch.inference_mode()
    def _keep_logits(self, size: int) -> None:
        """To where they last until the next replay of any graph that is asked for them."""
        self._logits[:size].copy_(self._computed)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect now, and not before the end: a graph or a stream that a collection finalises within a capture makes calls
    that break it, and torch.cuda.graph no longer collects first.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def make_decode_graphs(
    model: DecoderModel, kv_cache: KVCacheTensors, settings: EngineSettings, max_model_len: int
) -> DecodeGraphs | None:
    """Graphs of the sizes that are set, or the usual ones, not captured yet; None where they are off or the model has
    no head and so decodes nothing.
    """
    if not settings.cuda_graphs.enabled or model.lm_head is None:
        return None
    sizes = settings.cuda_graphs.sizes or decode_graph_sizes(settings.max_num_seqs)
    chunk_sizes = chunk_graph_sizes(min(settings.cuda_graphs.chunk_tokens, settings.max_num_batched_tokens))
    return DecodeGraphs(model, kv_cache, CudaGraphBackend(model.device), sizes, max_model_len, chunk_sizes)


def graph_kinds(batch_sizes: Sequence[int], max_model_len: int, chunk_sizes: Sequence[int] = ()) -> list[GraphKind]:
    """The graphs, in the order of their size: decode steps of all batch sizes for short rows; where rows may be longer,
    of the powers of two and the largest size for rows of any length, since reading such rows takes most of a step; and
    each number of tokens in chunks beside a few numbers of rows.
    """
    largest = max(batch_sizes)
    kinds = {GraphKind(0, size, min(SHORT_ROW_TOKENS, max_model_len)) for size in batch_sizes}
    kinds |= {GraphKind(0, size, max_model_len) for size in batch_sizes if size & (size - 1) == 0 or size == largest}
    beside = {size for size in batch_sizes if size in CHUNK_ROWS or size == largest}
    kinds |= {GraphKind(tokens, size, max_model_len) for tokens in chunk_sizes for size in beside}
    return sorted(kinds)


def chunk_graph_sizes(max_tokens: int) -> tuple[int, ...]:
    """256, 384, 512, 768, 1024 and on, up to max_tokens, which is the last; none below 256.

    A step pads to the next: less than half of its tokens, a fifth on average.
    """
    if max_tokens < LEAST_CHUNK_TOKENS:
        return ()
    powers = [1 << exponent for exponent in range(LEAST_CHUNK_TOKENS.bit_length() - 1, max_tokens.bit_length())]
    sizes = (size for power in powers for size in (power, power + power // 2))
    return (*(size for size in sizes if size < max_tokens), max_tokens)


def decode_graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, then every 8 to 64, every 16 to 256 and every 32 to 512; the last is max_num_seqs or 512.

    A step pads to the next size: less than half of its rows up to 16, less than a fifth above 64.
    """
    limit = min(max_num_seqs, MAX_DEFAULT_SIZE)
    sizes = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, MAX_DEFAULT_SIZE, 32))
    return (*(size for size in sizes if size < limit), limit)


class DecodeBuffers:
    """Inputs of decode steps at addresses that never change, for up to `max_rows` rows of `max_blocks` blocks.

    A step of fewer rows fills them up with padding: token 0 at position 0, written to the first slot of the null block
    (slot 0), which is also the one key it sees. Smaller batches are the first rows of larger ones.
    """

    def __init__(self, max_rows: int, max_blocks: int, device: torch.device) -> None:
        self._max_rows = max_rows
        self._width = width = -(-max_rows // 4) * 4  # 16 bytes: each half of a line of `_state` is aligned
        self._staging = StagingBuffer.pair(device)
        # Token ids, positions, slots; of draws seeds, positions and top_k; and in the halves of two lines lengths as
        # int32, temperatures, top_p and min_p as float32: one copy for all.
        self._state = torch.zeros((8, width), dtype=torch.int64, device=device)
        self._seq_lens = self._state[6].view(torch.int32)[:max_rows]
        self._seq_lens.fill_(1)
        self._block_tables = torch.zeros((max_rows, max_blocks), dtype=torch.int32, device=device)
        self._cu_seqlens_q = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(max_rows, dtype=torch.int64, device=device)

    def fill(
        self, planned: PlannedBatch, size: int, chosen: torch.Tensor | None = None, draws: Draws | None = None
    ) -> tuple[int, ...]:
        """Write a plain decode step and padding up to `size` rows; returns the rows' lengths.

        One copy to the device and two on it, in the order of the current stream. Of the block tables only as many
        columns are written as the longest row has blocks: nobody reads a table past its row's length.
        chosen, draws: see `StepExecutor.execute`; without draws rows are greedy.
        """
        rows, count = planned.decode, planned.num_tokens
        if rows is None or not count <= size <= self._max_rows:
            raise EngineFatal(f"a decode step of {count} rows does not go into a graph of {size}")
        state = np.zeros(self._state.shape, dtype=np.int64)
        state[:3, :count] = planned.token_ids, planned.positions, planned.slot_mapping
        seq_lens = state[6].view(np.int32)[: self._max_rows]
        seq_lens[:] = 1
        seq_lens[:count] = rows.seq_lens
        if draws is not None:
            temperatures, seeds, positions, top_k, *shares = draws
            state[3:6, :count] = seeds, positions, top_k
            state[6].view(np.float32)[self._width : self._width + count] = temperatures
            state[7].view(np.float32).reshape(2, self._width)[:, :count] = shares
        tables = np.zeros((size, rows.block_tables.shape[1]), dtype=np.int32)
        tables[:count] = rows.block_tables
        staged_state, staged_tables = next(self._staging).send([state, tables])
        self._state.copy_(staged_state)
        if chosen is not None:
            fill_in(self._state[0], chosen)
        self._block_tables[:size, : tables.shape[1]].copy_(staged_tables)
        return (*rows.seq_lens.tolist(), *[1] * (size - count))

    def draws(self, size: int) -> DrawTensors:
        """Of the first rows, as `Operations.choose_tokens` takes them."""
        seeds, positions, top_k = self._state[3:6, :size]
        _, temperatures, top_p, min_p = self._state[6:].view(torch.float32).view(4, self._width)[:, :size]
        return temperatures, seeds, positions, Truncation(top_k, top_p, min_p)

    def batch(self, kv_lens: tuple[int, ...]) -> ForwardBatch:
        """The batch over the first len(kv_lens) rows. kv_lens: the rows' lengths, or bounds of them."""
        size = len(kv_lens)
        token_ids, positions, slot_mapping = self._state[:3, :size]
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            logits_indices=self._rows[:size],
            hidden_indices=self._rows[:0],
            hidden_lens=(),
            decode=AttentionRows(
                block_tables=self._block_tables[:size],
                cu_seqlens_q=self._cu_seqlens_q[: size + 1],
                seq_lens=self._seq_lens[:size],
                query_lens=(1,) * size,
                kv_lens=kv_lens,
            ),
            prefill=None,
            num_decode_tokens=size,
        )


class GraphBackend(Protocol):
    """Captures a run over static buffers, so that replaying it takes one launch."""

    def capture(self, run: DecodeRun, kv_len_bounds: tuple[int, ...]) -> DecodeRun:
        """Capture `run` with bounds in place of the rows' lengths, which kernels read on the device.

        All captures share one memory pool, so a run may overwrite what an earlier one left there. The caller keeps what
        it gets as long as a run of it may be queued.

        Raises what `run` raised, or RuntimeError, where it cannot be captured or memory ran out (`is_out_of_memory`);
        EngineFatal where the device failed, so that no other capture can succeed.
        """

    def capture_after(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture what may follow a run of the last capture, and reads tensors that the capture left and the caller
        has kept until now. They need not be kept any longer: until another capture is run they stay as they are.

        Raises as `capture` does.
        """


class CudaGraphBackend:
    """Captures on a stream of its own, all graphs in one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # of torch
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: DecodeRun, kv_len_bounds: tuple[int, ...]) -> DecodeRun:
        """See `GraphBackend.capture`."""
        graph = self._graph(lambda: run(kv_len_bounds))
        return lambda _: graph.replay()

    def capture_after(self, run: Callable[[], None]) -> Callable[[], None]:
        """See `GraphBackend.capture_after`."""
        return self._graph(run).replay

    def _graph(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """A graph of the run.

        The run before the capture compiles and loads kernels, which a capture forbids, and has cuBLAS take the stream's
        workspace: the graph points to it, and torch keeps it to the end of the process.
        """
        current = torch.cuda.current_stream(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                run()
            # thread_local: what other threads do with the GPU meanwhile, such as pinning memory, breaks no capture.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                run()
        except BaseException:
            # Where ending the capture fails, torch leaves the stream current and the pool as one that is recorded to.
            torch.cuda.set_stream(current)
            self._pool = torch.cuda.graph_pool_handle()
            self._require_device()
            raise
        current.wait_stream(self._stream)
        return graph

    def _require_device(self) -> None:
        """Raise EngineFatal if the device is at fault, which shows in every call; a refused capture leaves no fault.

        Waits for what the side stream still runs, too.
        """
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError as fault:
            raise EngineFatal(f"the device failed while a decode step was captured: {fault}") from fault
