"""The tensors that captured decode steps read."""

from __future__ import annotations

import numpy as np
import torch

from engine.errors import EngineFatal
from engine.execution.forward_batch import ForwardBatch
from engine.execution.pending_tokens import fill_in
from engine.execution.planned_batch import PlannedBatch
from engine.execution.staging_buffer import StagingBuffer
from kernels.attention_types import AttentionRows


class DecodeBuffers:
    """Inputs of decode steps at addresses that never change, for up to `max_rows` rows of `max_blocks` blocks.

    A step of fewer rows fills them up with padding: token 0 at position 0, written to the first slot of the null block
    (slot 0), which is also the one key it sees. Smaller batches are the first rows of larger ones.
    """

    def __init__(self, max_rows: int, max_blocks: int, device: torch.device) -> None:
        self._max_rows = max_rows
        width = max_rows + max_rows % 2  # 16 bytes: each line of `_state` is aligned
        self._staging = StagingBuffer.pair(device)
        # Token ids, positions, slots, and in the first half of the last line the lengths, int32: one copy for all.
        self._state = torch.zeros((4, width), dtype=torch.int64, device=device)
        self._seq_lens = self._state[3].view(torch.int32)[:max_rows]
        self._seq_lens.fill_(1)
        self._block_tables = torch.zeros((max_rows, max_blocks), dtype=torch.int32, device=device)
        self._cu_seqlens_q = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(max_rows, dtype=torch.int64, device=device)

    def fill(self, planned: PlannedBatch, size: int, chosen: torch.Tensor | None = None) -> None:
        """Write a plain decode step (`PlannedBatch.is_plain_decode`) and padding up to `size` rows.

        chosen: see `StepExecutor.execute`.

        One copy to the device and two on it, in the order of the current stream. Of the block tables only as many
        columns are written as the longest row has blocks: nobody reads a table past its row's length.
        """
        rows, count = planned.decode, planned.num_tokens
        if rows is None or not count <= size <= self._max_rows:
            raise EngineFatal(f"a decode step of {count} rows does not go into a graph of {size}")
        state = np.zeros(self._state.shape, dtype=np.int64)
        state[:3, :count] = planned.token_ids, planned.positions, planned.slot_mapping
        seq_lens = state[3].view(np.int32)[: self._max_rows]
        seq_lens[:] = 1
        seq_lens[:count] = rows.seq_lens
        tables = np.zeros((size, rows.block_tables.shape[1]), dtype=np.int32)
        tables[:count] = rows.block_tables
        staged_state, staged_tables = next(self._staging).send([state, tables])
        self._state.copy_(staged_state)
        if chosen is not None:
            fill_in(self._state[0], chosen)
        self._block_tables[:size, : tables.shape[1]].copy_(staged_tables)

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
