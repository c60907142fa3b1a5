"""What the figures were measured on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.loading.derived_settings import usable_cores
from tests.benchmarks.checkout import Checkout

FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")


@dataclass(frozen=True)
class PeersMachine:
    """CPU and source."""

    cpu: str
    num_cpus: int
    features: tuple[str, ...]  # of those that decide how fast a type is
    load: float  # runnable processes over the minute before
    torch: str
    checkout: Checkout

    @classmethod
    def read(cls) -> PeersMachine:
        """This machine. Linux only."""
        info = Path("/proc/cpuinfo").read_text()
        flags = _value(info, "flags").split()
        return cls(
            cpu=_value(info, "model name"),
            num_cpus=usable_cores(),
            features=tuple(name for name in FEATURES if name in flags),
            load=os.getloadavg()[0],
            torch=torch.__version__,
            checkout=Checkout.read(),
        )

    def __str__(self) -> str:
        return (
            f"{self.cpu}, {self.num_cpus} CPUs ({' '.join(self.features)}), load before {self.load:.2f}\n"
            f"torch {self.torch}, {self.checkout}"
        )


def _value(info: str, wanted: str) -> str:
    """Of the first line of that name; "" where there is none."""
    for line in info.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == wanted:
            return value.strip()
    return ""
