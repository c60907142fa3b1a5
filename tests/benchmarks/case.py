"""One operation at one shape: what is run, what it is compared with, and what the hardware would need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

Bound = Literal["bandwidth", "matmul"]


@dataclass(frozen=True)
class Workload:
    """A case with its tensors allocated."""

    amount: int  # bytes that must move, or FLOP that must be done
    formula: str  # how the amount is computed
    run: Callable[[], torch.Tensor]
    libraries: Mapping[str, Callable[[], torch.Tensor]] = field(default_factory=dict)  # the same result, by others
    restore: Callable[[], None] | None = None  # undoes what run does in place; not timed


Prepare = Callable[[torch.device], Workload]


@dataclass(frozen=True)
class Case:
    """A case before its tensors are allocated, so that one after the other fits a GPU."""

    operation: str  # name in `kernels.interface`, or a chain of them joined by +
    models: str
    shape: str
    bound: Bound  # what the amount is compared with
    prepare: Prepare
    goal_percent: float | None = None  # of the bound, on an H200
