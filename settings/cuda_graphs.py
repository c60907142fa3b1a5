"""Capture of decode steps as CUDA graphs."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field

from settings.accepted import Accepted
from settings.grammar import read_whole_number
from settings.group_config import GROUP_CONFIG

_MAX_SIZE = 65_536
_SIZES_FORMS = f"whole numbers from 1 to {_MAX_SIZE}, rising, with commas between: 1,2,4,8"


def _check_sizes(text: str) -> str:
    sizes = _read_sizes(text)
    if not all(low < high for low, high in pairwise((0, *sizes, _MAX_SIZE + 1))):
        raise ValueError("not rising, or out of range")
    return text


def _read_sizes(text: str) -> tuple[int, ...]:
    return tuple(read_whole_number(part) for part in text.split(","))


class CudaGraphSettings(BaseModel):
    """Capture of decode steps as CUDA graphs."""

    model_config = GROUP_CONFIG

    enabled: bool | None = Field(
        default=None,
        description="Capture decode steps as CUDA graphs at start and replay them; none: on a GPU, without "
        "engine.deterministic.",
    )
    batch_sizes: Annotated[str, Accepted(_SIZES_FORMS), AfterValidator(_check_sizes)] | None = Field(
        default=None,
        description="Numbers of sequences that steps are captured for, others being padded to the next; larger steps "
        "are not captured. none: 1, 2, 4, every 8 to 64, every 16 to 256, every 32 to 512, up to engine.max_num_seqs.",
    )

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """`batch_sizes` as numbers."""
        return None if self.batch_sizes is None else _read_sizes(self.batch_sizes)
