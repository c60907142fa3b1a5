"""How large the KV pool becomes, with made-up memory figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import CapabilityError
from engine.loading.memory import cgroup_headroom_bytes, meminfo_available_bytes, num_blocks_that_fit


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
