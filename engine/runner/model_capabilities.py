"""What a loaded model can do, computed from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelCapabilities:
    """What a loaded model can do, computed from it (the seed's were constants, wrong by the number of layers: E11)."""

    architecture: str
    device: str
    dtype: str
    dtypes: tuple[str, ...]  # that engine.dtype may ask for on this device
    attention: str  # "mha", "gqa" or "mqa"
    max_batch_size: int  # sequences
    max_sequence_tokens: int
    max_batched_tokens: int
    kv_bytes_per_token: int
    weights_bytes: int
    continuous_batching: bool
    chunked_prefill: bool
    unified_prefill: bool
    prefix_cache: bool
    cuda_graphs: bool
