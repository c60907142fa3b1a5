"""Figures of a benchmark, read back."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True)
class FigureFile:
    """What `write_figures` wrote."""

    name: str  # of the file, without suffix
    figures: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises OSError, ValueError."""
        return cls(path.stem, json.loads(path.read_text()))

    @property
    def machine(self) -> str:
        """Processor and PyTorch."""
        machine = self.figures["machine"]
        cpu = " ".join(machine["cpu"].replace("(R)", "").replace("Processor", "").split())
        return f"{cpu}, {machine['num_cpus']} CPUs, torch {machine['torch']}"

    @property
    def commit(self) -> str:
        """Its first seven digits."""
        return str(self.figures["machine"]["checkout"]["commit"])[:7]

    @property
    def origin(self) -> str:
        """Commit, day, how busy the machine was, and the command."""
        machine, checkout = self.figures["machine"], self.figures["machine"]["checkout"]
        changes = " with changes" if checkout["dirty"] else ""
        when = f"{self.commit}{changes}, {self.figures['date']}, load before {machine['load']:.1f}"
        return f"{when}: {self.command}"

    @property
    def command(self) -> str:
        """Without what only the machine it ran on knows: paths."""
        words = shlex.split(self.figures["command"])
        hidden = {"--json", "--cache"}
        kept = [word for before, word in pairwise(("", *words)) if not {before, word} & hidden]
        return shlex.join("DIR" if word.startswith("/") else word for word in kept)
