"""One layer of an encoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from engine.models.affine import Affine
from engine.models.bidirectional_attention import bidirectional_attention
from engine.models.layer_norm import LayerNorm
from engine.models.packed_tokens import PackedTokens

GeluForm = Literal["none", "tanh"]  # exact, or its tanh approximation


@dataclass(frozen=True, eq=False)
class EncoderLayer:
    """Bidirectional attention and feed-forward, each normalised together with its input (post-norm, BERT)."""

    qkv_proj: Affine  # [3H, H]: queries, keys, values
    o_proj: Affine  # [H, H]
    attention_norm: LayerNorm
    up_proj: Affine  # [I, H]
    down_proj: Affine  # [H, I]
    output_norm: LayerNorm
    num_heads: int
    gelu: GeluForm | None  # None: relu

    def forward(self, x: torch.Tensor, tokens: PackedTokens) -> torch.Tensor:
        """x [T, H] -> [T, H]."""
        q, k, v = self.qkv_proj(x).view(x.shape[0], 3, self.num_heads, -1).unbind(1)
        attended = bidirectional_attention(q, k, v, tokens)
        x = self.attention_norm(self.o_proj(attended.flatten(1)) + x)
        return self.output_norm(self.down_proj(self._activated(self.up_proj(x))) + x)

    def _activated(self, inner: torch.Tensor) -> torch.Tensor:
        if self.gelu is None:
            return torch.nn.functional.relu(inner)
        return torch.nn.functional.gelu(inner, approximate=self.gelu)
