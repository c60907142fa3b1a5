"""What a forward pass answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False, slots=True)
class ForwardResult:
    """Logits and hidden states of those items that want them, each in the order of the items."""

    logits: torch.Tensor  # [S, V], float32: of the last token of each of the S items that want logits
    hidden: tuple[torch.Tensor, ...]  # one [n, H] an item that wants them, model dtype: final norm, all its n tokens
