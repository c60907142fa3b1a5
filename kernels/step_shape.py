"""What of a model decides how its kernels are launched."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes of a decoder that launches depend on beside the number of tokens; `num_experts` 0: no expert layers."""

    hidden_size: int
    intermediate_size: int  # of dense layers
    itemsize: int  # of the model dtype, bytes
    num_experts: int = 0
    top_k: int = 0
    expert_size: int = 0  # intermediate size of one expert
    bucketed_min_tokens: int | None = None  # tokens from which experts are sorted; None: never
