"""One figure, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass

from tests.benchmarks.gpu.decode_cell import DecodeCell
from tests.benchmarks.gpu.engine_load import EngineLoad
from tests.benchmarks.gpu.parity import Parity
from tests.benchmarks.gpu.peer_figures import PeerFigures
from tests.benchmarks.gpu.throughput import Throughput

Figure = Parity | EngineLoad | Throughput | DecodeCell | PeerFigures


@dataclass(frozen=True)
class GpuResult:
    """Of a section, as it comes."""

    section: str
    model: str
    graphs: bool | None  # whether decode steps were replayed as CUDA graphs; None where that has no meaning
    figure: Figure | None
    error: str = ""

    @property
    def differs(self) -> bool:
        """Whether our tokens are not transformers'."""
        return isinstance(self.figure, Parity) and not self.figure.holds
