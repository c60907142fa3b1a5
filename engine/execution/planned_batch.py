"""One forward pass, planned on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.execution.forward_batch import ForwardBatch
from engine.execution.planned_rows import PlannedRows

Int64 = npt.NDArray[np.int64]
Array = npt.NDArray[Any]

_NUM_OWN_ARRAYS = 5
_NUM_ROW_ARRAYS = 3


@dataclass(frozen=True, eq=False)
class PlannedBatch:
    """`ForwardBatch` before its arrays are on a device: T tokens, those of rows with one query (decode) first."""

    token_ids: Int64  # [T]
    positions: Int64  # [T]
    slot_mapping: Int64  # [T], block_id * block_size + offset
    logits_indices: Int64  # [S], into T, in the order of the items
    hidden_indices: Int64  # [W], into T, item after item
    hidden_lens: tuple[int, ...]  # tokens of each item that wants its hidden states; W in all
    decode: PlannedRows | None  # None: no row has one query
    prefill: PlannedRows | None  # None: every row has

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.token_ids.shape[0])

    @property
    def is_plain_decode(self) -> bool:
        """Whether each item is one query whose logits are wanted and nothing else, the rows in the items' order."""
        if self.decode is None or self.prefill is not None or self.decode.prefix_groups or self.hidden_lens:
            return False
        return int(self.logits_indices.shape[0]) == self.num_tokens

    @property
    def arrays(self) -> tuple[Array, ...]:
        """What a device needs, in the order `on_device` takes it back."""
        own = (self.token_ids, self.positions, self.slot_mapping, self.logits_indices, self.hidden_indices)
        decode, prefill = (() if rows is None else rows.arrays for rows in (self.decode, self.prefill))
        return (*own, *decode, *prefill)

    def on_device(self, tensors: Sequence[torch.Tensor]) -> ForwardBatch:
        """The batch over `tensors`, one for each of `arrays`."""
        token_ids, positions, slot_mapping, logits_indices, hidden_indices = tensors[:_NUM_OWN_ARRAYS]
        of_rows = tensors[_NUM_OWN_ARRAYS:]
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            logits_indices=logits_indices,
            hidden_indices=hidden_indices,
            hidden_lens=self.hidden_lens,
            decode=None if self.decode is None else self.decode.on_device(of_rows[:_NUM_ROW_ARRAYS]),
            prefill=None if self.prefill is None else self.prefill.on_device(of_rows[-_NUM_ROW_ARRAYS:]),
            num_decode_tokens=0 if self.decode is None else int(self.decode.seq_lens.shape[0]),
        )
