"""Compares us with other programs and with what the machine allows: `python -m tests.benchmarks.peers`, see `--help`.

Figures are tables for people and JSON for programs.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median

from engine.loading.derived_settings import usable_cores
from engine.loading.quantize import FORMATS
from tests.benchmarks.machine import PeersMachine, write_figures
from tests.benchmarks.peers.floor import FORMULA
from tests.benchmarks.peers.sides import PEERS, PeerMissing, TrialServerFailed
from tests.benchmarks.peers.trials import Comparison, Distance, MachineBusy, PeersRun
from tests.benchmarks.peers.workload import MAX_POSITIONS, WORKLOADS

DTYPES = ("bfloat16", "float32")
DESCRIPTION = """\
Our time over a peer's, or over our own without the queue: alternating trials of both in one run, fresh random prompts
in each, loading excluded. Beside it the machine's rates and our time over what it allows at best.
"""

RATIO_HEADER = (
    "workload",
    "ours, s",
    "other, s",
    "ours / other (range)",
    "same first token",
    "CPU taken by the hypervisor",
)
FLOOR_HEADER = (
    "workload",
    "rate of products, GFLOP/s",
    "reading, GB/s",
    "products, GFLOP",
    "attention, GFLOP",
    "read in decode, GB",
    "floor, s: prefill + decode",
    "ours / floor",
)

EXIT_CODE_TERMINATED = 143
MAX_PROMPT_TOKENS = 8000


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exit with 2 and one line if an argument cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.peers", description=DESCRIPTION)
    _add_what_is_compared(parser)
    parser.add_argument("--workload", default=",".join(WORKLOADS), metavar="NAMES", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--requests", type=int, default=64, metavar="N", help="in a trial; shared: a multiple of 4")
    parser.add_argument("--prompt-tokens", type=int, default=448, metavar="N", help="of each request, 32 to 8000")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="that each request generates")
    parser.add_argument("--threads", type=int, metavar="N", help="CPUs that both sides may use; else all")
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
    other.add_argument("--unquantised", action="store_true", help="our time with --scheme over ours without")
    parser.add_argument("--venv", type=Path, metavar="DIR", help="the peer's virtual environment")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of both sides")
    parser.add_argument("--peer-dtype", choices=DTYPES, help="of the peer, where it is faster in another")
    parser.add_argument("--quantization", choices=("none", "int8"), default="none", help="of our weights")
    scheme = "of the checkpoint that both sides load, written by `millrace quantize`"
    parser.add_argument("--scheme", choices=("none", *FORMATS), default="none", help=scheme)
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
    if options.unquantised and options.scheme == "none":
        return "--unquantised: needs --scheme"
    if options.quantization != "none" and options.scheme != "none":
        return "--quantization: a checkpoint of --scheme is quantised already"
    if options.json and not options.json.absolute().parent.is_dir():
        return f"--json: {options.json.absolute().parent} is no directory"
    return None


def _refused_number(options: argparse.Namespace) -> str | None:
    if options.trials < 3:
        return "--trials: accepted: 3 or more"
    groups = max(WORKLOADS[name].num_groups for name in options.workloads) or 1
    if options.requests < groups or options.requests % groups:
        return f"--requests: accepted: multiples of {groups}"
    if not 32 <= options.prompt_tokens <= MAX_PROMPT_TOKENS:
        return f"--prompt-tokens: accepted: 32 to {MAX_PROMPT_TOKENS}"
    if options.max_tokens < 2 or options.prompt_tokens + options.max_tokens > MAX_POSITIONS:
        return f"--max-tokens: accepted: 2 or more, with the prompt's at most {MAX_POSITIONS}"
    if options.threads is not None and not 1 <= options.threads <= usable_cores():
        return f"--threads: accepted: 1 to {usable_cores()}"
    if not 0 <= options.max_stolen <= 1:
        return "--max-stolen: accepted: 0 to 1"
    return None


def ratio_table(comparisons: Sequence[Comparison]) -> str:
    """A table of the seconds of each trial, and the median and range of the ratios."""
    return _table(RATIO_HEADER, [_ratio_row(comparison) for comparison in comparisons])


def floor_table(distances: Mapping[str, Distance]) -> str:
    """A table of the least time of each workload, with its formula below."""
    rows = [_floor_row(name, distance) for name, distance in distances.items()]
    return f"{_table(FLOOR_HEADER, rows)}\n\n{FORMULA}"


def as_json(
    machine: PeersMachine,
    sides: Mapping[str, Mapping[str, str]],
    comparisons: Sequence[Comparison],
    distances: Mapping[str, Distance],
) -> dict[str, object]:
    """All figures as plain data. `sides`: what "ours" and "other" were."""
    return {
        "machine": asdict(machine),
        "sides": {name: dict(about) for name, about in sides.items()},
        "comparisons": [
            {**asdict(comparison), "ratios": comparison.ratios if comparison.other_s else (), "ratio": comparison.ratio}
            for comparison in comparisons
        ],
        "distances": {
            name: {**asdict(distance), "floor_s": distance.floor.total_s} for name, distance in distances.items()
        },
    }


def _ratio_row(c: Comparison) -> tuple[str, ...]:
    stolen = f"{100 * min(c.stolen):.0f} to {100 * max(c.stolen):.0f} %"
    if c.num_repeated:
        stolen += f", {c.num_repeated} pairs repeated"
    if c.ratio is None:
        return c.workload.name, _seconds(c.our_s), "", "", "", stolen
    ratio = f"{c.ratio:.3f} ({min(c.ratios):.3f} to {max(c.ratios):.3f})"
    same = f"{100 * c.same_first_token:.0f} %"
    return c.workload.name, _seconds(c.our_s), _seconds(c.other_s), ratio, same, stolen


def _floor_row(name: str, d: Distance) -> tuple[str, ...]:
    rates = ", ".join(f"{dtype} {rate / 1e9:.0f}" for dtype, rate in d.rates.flop_per_s.items())
    return (
        name,
        rates,
        f"{d.rates.read_bytes_per_s / 1e9:.1f}",
        f"{d.floor.flop.products / 1e9:.0f}",
        f"{d.floor.flop.attention / 1e9:.0f}",
        f"{d.floor.decode_bytes / 1e9:.1f}",
        f"{d.floor.prefill_s:.2f} + {d.floor.decode_s:.2f} = {d.floor.total_s:.2f}",
        f"{d.times:.2f}",
    )


def _seconds(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({', '.join(f'{value:.2f}' for value in values)})"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables and write the JSON. Returns 0; 1 if the peer is missing, a side failed or the CPU was taken."""
    options = parse(arguments)
    # As an exception, so that the sides, which are processes of their own, are ended too.
    handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_CODE_TERMINATED))
    try:
        if options.peer is not None:
            PEERS[options.peer].python(options.venv)
        if options.threads is not None:  # what is started from here on inherits it
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
        with _cache(options.cache) as cache:
            run = PeersRun(options, cache)
            print(run.machine, flush=True)
            for comparison in run.measure():
                print(".", comparison.workload.name, flush=True)
    except (PeerMissing, TrialServerFailed, MachineBusy) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, handler)
    for name, about in run.sides.items():
        print(f"{name}: {', '.join(about.values()) or 'nothing'}")
    print(f"\n{ratio_table(run.comparisons)}")
    for name, seconds in run.command_s.items():
        print(f"{name}: `submit --wait`, start-up and polling included: {', '.join(f'{s:.2f}' for s in seconds)} s")
    if run.distances:
        print(f"\n{floor_table(run.distances)}")
    if options.json is not None:
        figures = as_json(run.machine, run.sides, run.comparisons, run.distances)
        figures["command_s"] = run.command_s
        write_figures(options.json, "peers", arguments, figures)
    return 0


@contextmanager
def _cache(directory: Path | None) -> Iterator[Path]:
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        yield directory
        return
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


if __name__ == "__main__":
    sys.exit(main())
