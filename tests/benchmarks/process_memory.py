"""Memory of a process, as Linux counts it."""

from __future__ import annotations

from pathlib import Path


def rss_mib(pid: int | str = "self") -> float:
    """What it has in memory now."""
    return _field(pid, "VmRSS")


def peak_rss_mib(pid: int | str = "self") -> float:
    """The most it has had since it began, or since `forget_peak`.

    Not getrusage: its ru_maxrss begins with what the process had that started this one.
    """
    return _field(pid, "VmHWM")


def forget_peak(pid: int) -> None:
    """Let the peak begin anew with what the process has now, see proc(5) on clear_refs."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _field(pid: int | str, name: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024
