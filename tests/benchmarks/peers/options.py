"""The command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.peers.peers import PEERS
from tests.benchmarks.peers.workload import WORKLOADS

DTYPES = ("bfloat16", "float32")
DESCRIPTION = """\
Our time over a peer's, or over our own without the queue: alternating trials of both in one run, fresh random prompts
in each, loading excluded. Beside it the machine's rates and our time over what it allows at best.
"""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Exits with 2 and one line where an argument cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.peers", description=DESCRIPTION)
    _add_what_is_compared(parser)
    parser.add_argument("--workload", default=",".join(WORKLOADS), metavar="NAMES", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--requests", type=int, default=64, metavar="N", help="in a trial; a multiple of 4")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="that each request generates")
    parser.add_argument("--trials", type=int, default=3, metavar="N", help="of each side, after one that warms up")
    again = "run a pair of trials again if the hypervisor took a larger share of the CPUs, 0 to 1"
    parser.add_argument("--max-stolen", type=float, default=1.0, metavar="SHARE", help=again)
    parser.add_argument("--cache", type=Path, metavar="DIR", help="keeps the checkpoints; else they are made anew")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
    options = parser.parse_args(arguments)
    options.workloads = options.workload.split(",")
    options.peer_dtype = options.peer_dtype or options.dtype
    if reason := _refusal(options):
        parser.error(reason)
    return options


def _add_what_is_compared(parser: argparse.ArgumentParser) -> None:
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--peer", choices=PEERS, help="none: only ours and the machine")
    other.add_argument("--through-queue", action="store_true", help="Redis and a worker over the engine alone")
    parser.add_argument("--venv", type=Path, metavar="DIR", help="the peer's virtual environment")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of both sides")
    parser.add_argument("--peer-dtype", choices=DTYPES, help="of the peer, where it is faster in another")
    parser.add_argument("--quantization", choices=("none", "int8"), default="none", help="of our weights")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of ours; repeatable")
    parser.add_argument("--sorted", action="store_true", help="the peer gets the prompts sorted, we do not")


def _refusal(options: argparse.Namespace) -> str | None:
    unknown = [name for name in options.workloads if name not in WORKLOADS]
    if unknown:
        return f"--workload: {', '.join(unknown)}; accepted: {', '.join(WORKLOADS)}"
    if reason := _refused_number(options):
        return reason
    if options.peer and options.venv is None:
        return f"--venv: needed with --peer; {PEERS[options.peer].install}"
    if options.sorted and not options.peer:
        return "--sorted: needs --peer"
    if options.json and not options.json.absolute().parent.is_dir():
        return f"--json: {options.json.absolute().parent} is no directory"
    return None


def _refused_number(options: argparse.Namespace) -> str | None:
    if options.trials < 3:
        return "--trials: accepted: 3 or more"
    if options.requests < 4 or options.requests % 4:
        return "--requests: accepted: multiples of 4"
    if options.max_tokens < 2:
        return "--max-tokens: accepted: 2 or more"
    if not 0 <= options.max_stolen <= 1:
        return "--max-stolen: accepted: 0 to 1"
    return None
