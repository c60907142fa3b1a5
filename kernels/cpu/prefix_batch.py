"""Groups of one step whose shared prefixes are equally long."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from kernels.cpu.block_run import BlockRun
from kernels.prefix_group import PrefixGroup

# Scores that groups of one batch may have together: 4 MiB of them. 64 rows of 16 heads over 512 keys have half as many.
MAX_SCORES = 1 << 20


class PrefixBatch(NamedTuple):
    """Groups that are attended together: two products a group, and of every other operation one for all of them.

    One a group, those dozen small operations cost more than the products: 4 groups of 16 rows over 384 keys, 8 query
    and 2 KV heads of 64, took 2.9 to 3.1 ms one after another and take 1.9 (two threads, Xeon 2.5 GHz); 16 and 8 heads
    of 128 took 7.3 and take 5.4.
    """

    # [n], int64: query * Hkv + KV head, those of one KV head of a group side by side. Each stands for Hq / Hkv vectors.
    head_ids: torch.Tensor
    num_vectors: tuple[int, ...]  # of each group
    prefixes: tuple[BlockRun, ...]  # of each group
    num_tokens: int  # of each prefix


def prefix_batches(
    groups: Iterable[tuple[slice, PrefixGroup]], block_tables: torch.Tensor, heads: tuple[int, int], block_size: int
) -> Iterator[PrefixBatch]:
    """All groups, by length.

    groups: each with the queries of its members; block_tables [num_rows, max_blocks] int32; heads: (Hq, Hkv).
    """
    by_length: dict[int, list[tuple[slice, PrefixGroup]]] = defaultdict(list)
    for queries, group in groups:
        by_length[group.num_tokens].append((queries, group))
    for num_tokens, equals in by_length.items():
        for part in _parts(equals, MAX_SCORES // num_tokens // heads[0]):
            ids = [_head_ids(queries, heads[1]) for queries, _ in part]
            num_blocks = num_tokens // block_size
            yield PrefixBatch(
                torch.cat(ids),
                tuple(each.shape[0] * heads[0] // heads[1] for each in ids),
                tuple(BlockRun.of(block_tables[group.first_row, :num_blocks].long()) for _, group in part),
                num_tokens,
            )


def _parts(groups: Iterable[tuple[slice, PrefixGroup]], max_queries: int) -> Iterator[list[tuple[slice, PrefixGroup]]]:
    """Runs of groups with at most so many queries together; one alone may have more."""
    part: list[tuple[slice, PrefixGroup]] = []
    num_queries = 0
    for queries, group in groups:
        more = queries.stop - queries.start
        if part and num_queries + more > max_queries:
            yield part
            part, num_queries = [], 0
        part.append((queries, group))
        num_queries += more
    yield part


def _head_ids(queries: slice, num_kv_heads: int) -> torch.Tensor:
    ids = torch.arange(queries.start * num_kv_heads, queries.stop * num_kv_heads)
    return ids.view(-1, num_kv_heads).t().flatten()
