"""Finds the rows of a step whose block tables begin alike, so that attention reads their shared prefix once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.operands import PrefixGroup

# Whether a shared prefix is worth an attention of its own: (rows that share it, tokens of it) -> yes or no.
Gate = Callable[[int, int], bool]


class _Cluster(NamedTuple):
    """Rows that are neighbours when sorted by block table, and the best split of them into groups so far."""

    rows: list[int]
    saved_blocks: int  # blocks that need not be read: (rows - 1) * blocks, over the groups
    groups: list[tuple[int, list[int]]]  # (shared blocks, rows)
    loose: list[int]  # rows in no group


def find_prefix_groups(
    block_tables: npt.NDArray[np.int32], num_shareable: npt.NDArray[np.int64], block_size: int, gate: Gate
) -> tuple[list[int], tuple[PrefixGroup, ...]]:
    """An order of the rows, and the groups in that order.

    block_tables [num_rows, max_blocks], 0 where a row has no more blocks; num_shareable [num_rows]: full blocks before
    the row's own queries. Without groups the order is that of the rows. Prefixes nest, as where some rows share
    examples behind a system prompt. Groups do not, since each level would cost a pass over the outputs of its rows: a
    row is in the group that saves most reading over all rows.
    """
    num_rows, width = block_tables.shape
    tables = np.where(np.arange(width) < num_shareable[:, None], block_tables, 0)
    by_table: list[int] = np.argsort(tables.astype(">i4").view(f"S{4 * width}").ravel(), kind="stable").tolist()
    shared = _shared_with_next(tables[by_table])
    groups = _split(by_table, shared, lambda rows, blocks: gate(rows, blocks * block_size))
    if not groups:
        return list(range(num_rows)), ()
    groups = sorted((blocks, sorted(rows)) for blocks, rows in groups)
    grouped = list(chain.from_iterable(rows for _, rows in groups))
    firsts = np.cumsum([0, *(len(rows) for _, rows in groups)])
    order = [*grouped, *sorted(set(range(num_rows)).difference(grouped))]
    return order, tuple(
        PrefixGroup(int(first), len(rows), blocks * block_size)
        for first, (blocks, rows) in zip(firsts, groups, strict=False)
    )


def _shared_with_next(tables: npt.NDArray[np.int32]) -> list[int]:
    """Leading blocks that each row shares with the next one. tables: sorted, 0 past what may be shared."""
    equal = (tables[1:] == tables[:-1]) & (tables[1:] > 0)
    lengths: list[int] = np.where(equal.all(axis=1), tables.shape[1], equal.argmin(axis=1)).tolist()
    return lengths


def _split(by_table: Sequence[int], shared: Sequence[int], gate: Gate) -> list[tuple[int, list[int]]]:
    """(shared blocks, rows) of each group: clusters grow from the longest common beginnings to the shortest."""
    clusters = [_Cluster([row], 0, [], [row]) for row in by_table]
    between = list(shared)  # clusters[i] and clusters[i + 1]
    for depth in sorted(set(shared) - {0}, reverse=True):
        merged: list[list[_Cluster]] = [[clusters[0]]]
        rest: list[int] = []
        for blocks, cluster in zip(between, clusters[1:], strict=True):
            if blocks == depth:
                merged[-1].append(cluster)
            else:
                merged.append([cluster])
                rest.append(blocks)
        clusters = [_merge(parts, depth, gate) for parts in merged]
        between = rest
    return [group for cluster in clusters for group in cluster.groups]


def _merge(parts: list[_Cluster], depth: int, gate: Gate) -> _Cluster:
    """Join clusters that share `depth` blocks: keep their groups, or make a new one of their loose rows and of the
    clusters that save less by themselves than they would in it.
    """
    if len(parts) == 1:
        return parts[0]
    groups: list[tuple[int, list[int]]] = []
    members: list[int] = []
    saved = 0
    for part in parts:
        if part.saved_blocks + depth * len(part.loose) >= depth * len(part.rows):
            groups += part.groups
            members += part.loose
            saved += part.saved_blocks
        else:
            members += part.rows
    saved += depth * (len(members) - 1)
    rows = [row for part in parts for row in part.rows]
    before = sum(part.saved_blocks for part in parts)
    if saved > before and gate(len(members), depth):
        return _Cluster(rows, saved, [*groups, (depth, members)], [])
    kept = [group for part in parts for group in part.groups]
    return _Cluster(rows, before, kept, [row for part in parts for row in part.loose])


@dataclass(frozen=True, slots=True)
class SharedPrefixGate:
    """Bounds below which each row is faster by itself: a group costs launches, copies and a merge."""

    min_rows: int
    min_tokens: int  # shared ones
    min_saved_tokens: int  # tokens that need not be read again: (rows - 1) * shared tokens

    def __call__(self, num_rows: int, num_tokens: int) -> bool:
        """Whether a group of num_rows rows (2 or more) that share num_tokens tokens is worth it."""
        is_large = num_rows >= self.min_rows and num_tokens >= self.min_tokens
        return is_large and (num_rows - 1) * num_tokens >= self.min_saved_tokens


# From `python -m tests.benchmarks.shared_prefix` on a CPU (tables in engine/DESIGN.md); not measured on a GPU.
# Rows with one query: a product with few queries is slow, and reading shared keys again finds them in the cache.
DECODE_GATE = SharedPrefixGate(min_rows=8, min_tokens=64, min_saved_tokens=2048)
# A chunk has many queries by itself: any group pays.
PREFILL_GATE = SharedPrefixGate(min_rows=2, min_tokens=16, min_saved_tokens=16)
