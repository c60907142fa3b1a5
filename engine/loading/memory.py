"""How much memory the machine has free, and how many KV blocks fit."""

from __future__ import annotations

from pathlib import Path

from engine.errors import CapabilityError

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def free_memory_bytes() -> int:
    """Bytes that an allocation could still get: MemAvailable of the machine or what the container's limit leaves,
    whichever is less. Raises CapabilityError where neither can be read.
    """
    available = meminfo_available_bytes(MEMINFO)
    headroom = cgroup_headroom_bytes(CGROUP)
    return available if headroom is None else min(available, headroom)


def meminfo_available_bytes(path: Path) -> int:
    """MemAvailable of a Linux meminfo file."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise CapabilityError(f"{path} cannot be read ({error}): set engine.kv_cache.num_blocks") from error
    for line in lines:
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise CapabilityError(f"{path} has no MemAvailable: set engine.kv_cache.num_blocks")


def cgroup_headroom_bytes(root: Path) -> int | None:
    """What the container's memory limit (cgroup v2) leaves; None where there is no limit.

    Pages of files count as free: the mapped weights lie there, and the kernel drops them before it refuses memory.
    """
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        statistics = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except FileNotFoundError:
        return None
    reclaimable = int(statistics.get("active_file", 0)) + int(statistics.get("inactive_file", 0))
    return None if limit == "max" else max(0, int(limit) - used + reclaimable)


def num_blocks_that_fit(budget_bytes: int, bytes_per_block: int, useful_blocks: int, settings: str) -> int:
    """Blocks for a budget, the null block included, and no more than can ever be of use.

    Raises CapabilityError, which says to raise `settings`, when not even one block besides the null block fits.
    """
    fit = budget_bytes // bytes_per_block
    if fit < 2:
        raise CapabilityError(
            f"the memory left for the KV cache is {max(0, budget_bytes)} bytes, two blocks need {2 * bytes_per_block}: "
            f"raise {settings}, or free memory"
        )
    return min(fit, useful_blocks + 1)
