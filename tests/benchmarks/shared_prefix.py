"""Measures what attention over shared prefixes saves here: `python -m tests.benchmarks.shared_prefix [--trials N]`.

One layer of float32 attention on one thread, one group of rows with a shared prefix: the same call with the group and
without, in turn. Figures are time without / time with the group, above 1 a gain. Time is the process's processor time,
so that other programs do not count. Queries, rows and block order are drawn for each trial, and the KV caches are
larger than the processor's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kernels import cpu
from kernels.operands import AttentionRows, PrefixGroup

BLOCK_SIZE = 16
NUM_ROWS = (2, 4, 8, 16, 64)
SHARED_TOKENS = (16, 32, 64, 128, 384, 1024)
DECODE_OWN_TOKENS = (16, 96)
CHUNK_TOKENS = 64
NUM_BLOCKS = 4096  # of 64 KiB and more
CALLS = 4  # layers of one step: what is derived from the rows is made in the first

ROWS = tuple((num_rows, 1, own) for num_rows in NUM_ROWS for own in DECODE_OWN_TOKENS) + tuple(
    (num_rows, CHUNK_TOKENS, CHUNK_TOKENS) for num_rows in NUM_ROWS if num_rows <= 16
)


@dataclass(frozen=True)
class Heads:
    """Shape of an attention layer."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Sizes:
    """The size of a group of rows that share a prefix."""

    num_rows: int
    query_tokens: int  # of each row: 1 is decode
    own_tokens: int  # most of a row, its queries included
    shared_tokens: int

    def make_rows(self) -> AttentionRows:
        """One group of rows over blocks in random order. A decode row has between half and all of the own tokens."""
        shared, own = self.shared_tokens // BLOCK_SIZE, -(-self.own_tokens // BLOCK_SIZE)
        blocks = (torch.randperm(NUM_BLOCKS - 1)[: shared + self.num_rows * own] + 1).int()
        heads = blocks[:shared].expand(self.num_rows, -1)
        lens = torch.randint(max(self.query_tokens, self.own_tokens // 2), self.own_tokens + 1, (self.num_rows,)).int()
        seq_lens = self.shared_tokens + lens
        return AttentionRows(
            block_tables=torch.cat((heads, blocks[shared:].view(self.num_rows, own)), dim=1),
            cu_seqlens_q=torch.arange(self.num_rows + 1).int() * self.query_tokens,
            seq_lens=seq_lens,
            query_lens=(self.query_tokens,) * self.num_rows,
            kv_lens=tuple(seq_lens.tolist()),
            prefix_groups=(PrefixGroup(0, self.num_rows, self.shared_tokens),),
        )


SHAPES = (
    Heads("16/8 heads of 128", 16, 8, 128),
    Heads("8/2 heads of 64", 8, 2, 64),
    Heads("32/4 heads of 128", 32, 4, 128),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table for each shape. Returns 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.shared_prefix", description=__doc__)
    parser.add_argument("--trials", type=int, default=4, metavar="N", help="pairs of trials of each case (3 or more)")
    trials = parser.parse_args(arguments).trials
    if trials < 3:
        parser.error("--trials: accepted: 3 or more")
    torch.set_num_threads(1)
    for heads in SHAPES:
        shape = (NUM_BLOCKS, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)
        caches = torch.randn(shape), torch.randn(shape)
        print(f"{heads.name}: times faster with the group (worst to best trial)\n")
        print(f"| rows | queries a row | own tokens | {' | '.join(f'{n} shared' for n in SHARED_TOKENS)} |")
        print(f"|{'---|' * (3 + len(SHARED_TOKENS))}")
        for numbers in ROWS:
            cells = [_cell(caches, heads, Sizes(*numbers, shared), trials) for shared in SHARED_TOKENS]
            print(f"| {' | '.join(map(str, numbers))} | {' | '.join(cells)} |", flush=True)
        print()
    return 0


def _cell(caches: tuple[torch.Tensor, torch.Tensor], heads: Heads, sizes: Sizes, trials: int) -> str:
    ratios = []
    for trial in range(trials + 1):  # the first warms up
        rows = sizes.make_rows()
        q = torch.randn(rows.num_queries, heads.num_heads, heads.head_dim)
        alone = replace(rows, prefix_groups=())
        in_turn = (alone, rows) if trial % 2 == 0 else (rows, alone)
        seconds = {id(one): _seconds(q, caches, one) for one in in_turn}
        if trial > 0:
            ratios.append(seconds[id(alone)] / seconds[id(rows)])
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _seconds(q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], rows: AttentionRows) -> float:
    attend = cpu.paged_decode_attention if rows.num_queries == rows.num_rows else cpu.paged_prefill_attention
    with torch.inference_mode():
        start = time.process_time()
        for _ in range(CALLS):
            attend(q, *caches, rows, 0.125)
        return time.process_time() - start


if __name__ == "__main__":
    sys.exit(main())
