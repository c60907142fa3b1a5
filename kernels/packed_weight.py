"""A weight in the layout of one implementation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight in the layout that one implementation's products read fastest; made by its `pack`, read by it alone."""

    parts: tuple[torch.Tensor, ...]  # what they are is the implementation's business
    shape: tuple[int, ...]  # of the weight it was made from: [N, K], or [E, N, K] for experts

    @classmethod
    def unchanged(cls, weight: torch.Tensor) -> Self:
        """The tensor itself as the one part."""
        return cls((weight,), tuple(weight.shape))

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that `unchanged` was given. Raises ValueError if there are more parts than one."""
        (tensor,) = self.parts
        return tensor

    @cached_property
    def matrices(self) -> tuple[torch.Tensor, ...]:
        """Each expert's matrix of a weight [E, N, K]: its part, or a view of the tensor that `unchanged` was given.

        Made once: a view costs 3 us, and a layer of 128 experts may need 256. Raises ValueError where an expert has
        more parts than one.
        """
        if len(self.parts) == self.shape[0] and self.parts[0].dim() == 2:
            return self.parts
        return self.tensor.unbind()

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(part.nbytes for part in self.parts)
