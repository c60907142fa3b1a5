"""Attention in which every token of a sequence sees every other."""

from __future__ import annotations

import torch

from engine.models.packed_tokens import PackedTokens


def bidirectional_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tokens: PackedTokens) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v within each sequence. q, k, v: [T, heads, D] -> [T, heads, D].

    One call of torch's attention for each length that occurs: nothing is padded, so nothing has to be masked.
    """
    output = torch.empty_like(q)
    for rows in tokens.rows_by_length:
        queries, keys, values = (x[rows].transpose(1, 2) for x in (q, k, v))  # [n, heads, length, D]
        attended = torch.nn.functional.scaled_dot_product_attention(queries, keys, values)
        output[rows] = attended.transpose(1, 2)
    return output
