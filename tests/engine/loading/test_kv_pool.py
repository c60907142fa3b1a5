"""How large the KV pool becomes, which settings size it, and what its tensors take."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from engine.errors import CapabilityError
from engine.kv_cache.tensors import KVCacheSpec, KVCacheTensors
from engine.loading import derived_settings
from engine.loading.derived_settings import derive_settings
from engine.loading.kv_pool import (
    cgroup_headroom_bytes,
    expected_step_bytes,
    kv_cache_spec,
    meminfo_available_bytes,
    num_blocks_that_fit,
)
from settings import EffectiveSettings, Source, load_settings
from tests.support.devices import simulated_device
from tests.support.engines import load_engine
from tests.support.tiny_checkpoint import decoder_config, make_checkpoint

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MIB = 1 << 20
BLOCKS, LENGTH = "engine.kv_cache.num_blocks", "engine.max_model_len"


def test_the_pool_fills_its_budget() -> None:
    assert num_blocks_that_fit(1000, bytes_per_block=100, useful_blocks=1000, settings="") == 10


def test_the_pool_is_no_larger_than_all_sequences_at_full_length() -> None:
    assert num_blocks_that_fit(10**12, bytes_per_block=100, useful_blocks=640, settings="") == 641


@pytest.mark.parametrize("budget", [-5, 0, 199])
def test_a_budget_without_room_for_a_block_names_the_settings(budget: int) -> None:
    with pytest.raises(CapabilityError, match=r"two blocks need 200.*raise engine.x"):
        num_blocks_that_fit(budget, bytes_per_block=100, useful_blocks=10, settings="engine.x")


def test_available_memory_is_read_from_meminfo(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  2048 kB\nMemFree: 1 kB\nMemAvailable:   1024 kB\n")
    assert meminfo_available_bytes(meminfo) == 1024 * 1024


@pytest.mark.parametrize("text", ["MemTotal: 1 kB\n", None])
def test_unreadable_memory_figures_name_the_setting_that_does_without(tmp_path: Path, text: str | None) -> None:
    meminfo = tmp_path / "meminfo"
    if text is not None:
        meminfo.write_text(text)
    with pytest.raises(CapabilityError, match=r"set engine\.kv_cache\.num_blocks"):
        meminfo_available_bytes(meminfo)


@pytest.mark.parametrize(("limit", "expected"), [("max", None), ("1000", 750), ("200", 0)])
def test_a_container_counts_what_its_limit_leaves(tmp_path: Path, limit: str, expected: int | None) -> None:
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text("400\n")
    (tmp_path / "memory.stat").write_text("anon 250\nactive_file 100\ninactive_file 50\nslab 3\n")
    assert cgroup_headroom_bytes(tmp_path) == expected


def test_without_a_container_there_is_no_limit(tmp_path: Path) -> None:
    assert cgroup_headroom_bytes(tmp_path) is None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def _derive(model: Path, **overrides: str) -> EffectiveSettings:
    named = {f"engine.{name.replace('__', '.')}": value for name, value in overrides.items()}
    values = {"model.path": str(model), "engine.device": "cpu", **named}
    return derive_settings(load_settings(values, environ={}, dotenv_path=Path(os.devnull)))


def test_a_pool_that_will_be_measured_is_called_estimated(model: Path) -> None:
    with simulated_device(8 * MIB):
        effective = _derive(model, max_num_batched_tokens="64")
    assert effective.source_of(BLOCKS) is effective.source_of(LENGTH) is Source.ESTIMATED
    assert 2 < (effective.settings.engine.kv_cache.num_blocks or 0) < 8 * MIB // 4096
    assert effective.as_json()[BLOCKS]["source"] == "estimated"


def test_an_estimate_without_room_refuses_nothing(model: Path) -> None:
    with simulated_device(1024):
        effective = _derive(model, max_model_len="500")
    assert effective.settings.engine.kv_cache.num_blocks == 2
    assert effective.settings.engine.max_model_len == 500


def test_a_pool_that_was_set_is_no_estimate(model: Path) -> None:
    with simulated_device(8 * MIB):
        effective = _derive(model, kv_cache__num_blocks="20")
    assert effective.source_of(BLOCKS) is Source.COMMAND_LINE
    assert (effective.source_of(LENGTH), effective.settings.engine.max_model_len) == (Source.DERIVED, 19 * 16)


def test_a_cpu_refuses_the_gpus_setting(model: Path) -> None:
    with pytest.raises(
        CapabilityError, match=r"engine\.gpu_memory_utilization=0\.8: not on cpu; accepted: not set, or"
    ):
        _derive(model, gpu_memory_utilization="0.8")


def test_a_cpu_and_an_older_gpu_refuse_a_cache_in_float8(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CapabilityError, match=r"engine\.kv_cache\.dtype=fp8: .*'cpu': .* accepted: cuda, or auto"):
        _derive(model, kv_cache__dtype="fp8")
    monkeypatch.setattr(derived_settings, "operations", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    with pytest.raises(CapabilityError, match=r"dtype=fp8: .* 8\.6 does not convert e4m3; accepted: from 8\.9 on, or"):
        _derive(model, device="cuda", kv_cache__dtype="fp8", kv_cache__num_blocks="9")


@pytest.mark.parametrize(("dtype", "element_bytes"), [("auto", 2), ("fp8", 1)])
def test_a_cache_in_float8_holds_twice_the_tokens(
    model: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, element_bytes: int
) -> None:
    monkeypatch.setattr(derived_settings, "operations", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    with simulated_device(1 << 30):
        effective = _derive(
            model, device="cuda", dtype="bfloat16", kv_cache__dtype=dtype, kv_cache__num_blocks="9", max_model_len="64"
        )
    spec = kv_cache_spec(effective, decoder_config(model))
    assert spec.bytes_per_token == 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * element_bytes
    pools = KVCacheTensors.allocate(spec, 9, torch.device("cpu"))
    assert sum(pool.nbytes for pool in (*pools.keys, *pools.values)) == 9 * spec.bytes_per_block


def test_a_gpu_refuses_the_cpus_setting(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derived_settings, "operations", lambda _: None)
    with pytest.raises(CapabilityError, match=r"engine\.kv_cache\.memory_fraction=0\.4: not on cuda; .*utilization"):
        _derive(model, device="cuda", kv_cache__memory_fraction="0.4")


@pytest.mark.parametrize(("seqs", "tokens"), [(2, 700), (32, 32)])
def test_a_steps_memory_is_estimated_within_a_factor_of_two(tmp_path: Path, seqs: int, tokens: int) -> None:
    make_checkpoint(tmp_path, num_hidden_layers=1, vocab_size=2000, intermediate_size=256)
    sizes = {"engine.max_num_seqs": str(seqs), "engine.max_num_batched_tokens": str(tokens)}
    with simulated_device(1 << 32):
        engine = load_engine(tmp_path, sizes | {"engine.max_model_len": "720"})
    profile = engine.model_interface.status().memory_profile
    assert profile is not None
    config = engine.model.config
    assert 0.5 < expected_step_bytes(config, engine.settings.engine) / profile.activations_bytes < 2


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


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(), reason="this system has no huge pages"
)
def test_what_is_written_of_a_pool_lies_in_huge_pages() -> None:
    spec = KVCacheSpec(num_layers=3, block_size=16, num_kv_heads=2, head_dim=24, dtype=torch.bfloat16)
    pools = KVCacheTensors.allocate(spec, num_blocks=3000, device=torch.device("cpu"))
    for pool in (*pools.keys, *pools.values):
        pool.fill_(1.0)
    # Nearly all; half, since the machine's memory may be in pieces too small for some.
    assert _huge_bytes(pools.keys[0]) > pools.num_blocks * spec.bytes_per_block // 2


def test_a_pool_that_the_system_refuses_is_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("kernels.operands.mmap.mmap", refuse)
    spec = KVCacheSpec(num_layers=3, block_size=16, num_kv_heads=2, head_dim=8, dtype=torch.float32)
    with pytest.raises(MemoryError, match="Cannot allocate memory"):
        KVCacheTensors.allocate(spec, num_blocks=5000, device=torch.device("cpu"))


def _huge_bytes(tensor: torch.Tensor) -> int:
    """Bytes in huge pages of the mapping that the tensor lies in."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if not first.endswith(":"):  # the head of a mapping: its addresses
            start, end = (int(part, 16) for part in first.split("-"))
            is_inside = start <= tensor.data_ptr() < end
        elif is_inside and first == "AnonHugePages:":
            return int(line.split()[1]) * 1024
    raise AssertionError("no mapping holds the tensor")


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
