"""The machine's owner gave its time to others."""

from __future__ import annotations


class MachineBusy(RuntimeError):
    """Too few pairs of trials in which the hypervisor took little."""

    def __init__(self, max_stolen: float, num_pairs: int, wanted: int) -> None:
        """max_stolen: share of the CPUs, 0 to 1."""
        super().__init__(
            f"--max-stolen {max_stolen:g}: {num_pairs} pairs of trials in which the hypervisor took no larger share of "
            f"the CPUs, {wanted} wanted; later, or with a larger share"
        )
