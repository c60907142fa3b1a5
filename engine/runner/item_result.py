"""What the model interface answers for one item: a tagged union, never a length or a sign that means something."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.errors import EngineError


@dataclass(frozen=True, slots=True)
class TokenResult:
    """The greedy choice."""

    token_id: int


@dataclass(frozen=True, eq=False, slots=True)
class LogitsResult:
    """The item's logits [V], float32."""

    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class ErrorResult:
    """This item failed; its batch mates did not."""

    error: EngineError


ItemResult = TokenResult | LogitsResult | ErrorResult
