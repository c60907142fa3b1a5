"""The rows of one attention call, planned on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.attention_types import AttentionRows, PrefixGroup

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class PlannedRows:
    """`AttentionRows` before its arrays are on a device. Row i has the queries of one item."""

    block_tables: Int32  # [num_rows, max_blocks], 0, the null block, past the blocks of a row
    cu_seqlens_q: Int32  # [num_rows + 1], starts at 0
    seq_lens: Int32  # [num_rows], tokens in KV after this step
    prefix_groups: tuple[PrefixGroup, ...]

    @property
    def arrays(self) -> tuple[Int32, Int32, Int32]:
        """What a device needs, in the order `on_device` takes it back."""
        return self.block_tables, self.cu_seqlens_q, self.seq_lens

    def on_device(self, tensors: Sequence[torch.Tensor]) -> AttentionRows:
        """The rows over `tensors`, one for each of `arrays`."""
        block_tables, cu_seqlens_q, seq_lens = tensors
        return AttentionRows(
            block_tables=block_tables,
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=seq_lens,
            query_lens=tuple(np.diff(self.cu_seqlens_q).tolist()),
            kv_lens=tuple(self.seq_lens.tolist()),
            prefix_groups=self.prefix_groups,
        )
