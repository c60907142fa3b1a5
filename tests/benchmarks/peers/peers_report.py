"""Figures as tables for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median

from tests.benchmarks.peers.comparison import Comparison
from tests.benchmarks.peers.distance import Distance
from tests.benchmarks.peers.floor import FORMULA
from tests.benchmarks.peers.peers_machine import PeersMachine

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


def ratio_table(comparisons: Sequence[Comparison]) -> str:
    """Seconds of each trial, the ratio of each pair's median and range."""
    return _table(RATIO_HEADER, [_ratio_row(comparison) for comparison in comparisons])


def floor_table(distances: Mapping[str, Distance]) -> str:
    """By workload, and the formula below."""
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
