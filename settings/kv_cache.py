"""The paged KV cache."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field

from settings.accepted import Accepted
from settings.group_config import GROUP_CONFIG
from settings.units import Blocks, Tokens


def _check_power_of_two(value: int) -> int:
    if value & (value - 1) != 0:
        raise ValueError("not a power of two")
    return value


class KVCacheSettings(BaseModel):
    """Size of the block pool. There is no other kind of KV cache than the paged one."""

    model_config = GROUP_CONFIG

    block_size: Annotated[Tokens, Accepted("a power of two, 8 to 256"), AfterValidator(_check_power_of_two)] = Field(
        default=16, ge=8, le=256, description="Tokens in one block of the KV cache."
    )
    num_blocks: Blocks | None = Field(
        default=None,
        ge=2,
        le=2**31 - 1,
        description="Blocks in the pool, the null block included; none: on a CPU derived from memory_fraction, on CUDA "
        "what engine.gpu_memory_utilization leaves, measured at start.",
    )
    memory_fraction: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Part of the memory left free by the weights that the pool takes, where num_blocks is none. "
        "CPU only.",
    )
