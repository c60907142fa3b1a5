"""The memory of the KV cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.kv_cache.tensors import KVCacheSpec, KVCacheTensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pools_have_the_shape_and_type_of_the_specification_and_hold_zeros(dtype: torch.dtype) -> None:
    spec = KVCacheSpec(num_layers=3, block_size=16, num_kv_heads=2, head_dim=8, dtype=dtype)
    pools = KVCacheTensors.allocate(spec, num_blocks=5, device=torch.device("cpu"))
    assert len(pools.keys) == len(pools.values) == 3
    for pool in (*pools.keys, *pools.values):
        assert pool.shape == (5, 16, 2, 8)
        assert pool.dtype is dtype
        assert not pool.any()
        pool[1, 2, 1] = 3.0
        assert pool.sum().item() == 24.0


def test_a_pool_takes_memory_only_where_it_is_written() -> None:
    spec = KVCacheSpec(num_layers=1, block_size=16, num_kv_heads=8, head_dim=128, dtype=torch.float32)
    before = _resident_bytes()
    pools = KVCacheTensors.allocate(spec, num_blocks=8192, device=torch.device("cpu"))
    pools.keys[0][1] = 1.0
    assert pools.keys[0].nbytes + pools.values[0].nbytes == 1 << 30
    assert _resident_bytes() - before < 64 << 20


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
