"""One forward pass as a value."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.attention_types import AttentionRows


@dataclass(frozen=True, eq=False)
class ForwardBatch:
    """One forward pass as a value: T tokens, those of rows with one query (decode) first, then the chunks."""

    token_ids: torch.Tensor  # [T], int64
    positions: torch.Tensor  # [T], int64
    slot_mapping: torch.Tensor  # [T], int64, block_id * block_size + offset
    logits_indices: torch.Tensor  # [S], int64, into T: whose logits are wanted, in the order of the items
    hidden_indices: torch.Tensor  # [W], int64, into T: whose hidden states are wanted, item after item
    hidden_lens: tuple[int, ...]  # tokens of each item that wants them; W in all
    decode: AttentionRows | None  # the first `num_decode_tokens` tokens; None when there are none
    prefill: AttentionRows | None  # the others
    num_decode_tokens: int

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.token_ids.shape[0])
