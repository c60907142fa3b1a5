"""The command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.gpu.gpu_model import MODELS

SECTIONS = ("parity", "nano-vllm", "decode", "shared-prefix", "peer")
BUDGET_S = 450.0
DESCRIPTION = """\
The whole engine on this GPU: parity with transformers on a small checkpoint, then Qwen3-0.6B, 8B and 30B-A3B with
random weights made in its memory: the nano-vllm and the shared-prefix workload, decode steps by batch size with and
without CUDA graphs, and transformers' continuous batching beside it. One call takes less than 8 minutes on an H200.
"""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Exits with 2 and one line where an argument cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu", description=DESCRIPTION)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON, after each of them")
    parser.add_argument(
        "--only", action="append", choices=SECTIONS, metavar="SECTION", help=f"of {', '.join(SECTIONS)}; repeatable"
    )
    parser.add_argument(
        "--model", action="append", choices=tuple(MODELS), metavar="NAME", help=f"of {', '.join(MODELS)}; repeatable"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an engine's setting")
    parser.add_argument(
        "--budget-s", type=float, default=BUDGET_S, metavar="S", help="nothing is begun after so many seconds"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: with --tiny")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny models and counts, to try the script: its figures are no measurement"
    )
    options = parser.parse_args(arguments)
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: {options.json.absolute().parent} is no directory")
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu: needs --tiny")
    if options.budget_s <= 0:
        parser.error("--budget-s: accepted: more than 0")
    options.sections = tuple(options.only or SECTIONS)
    options.models = tuple(name for name in MODELS if not options.model or name in options.model)
    return options
