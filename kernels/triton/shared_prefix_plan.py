"""What the kernels do about the shared prefixes of one step; the same for every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch

from kernels.attention_rows import AttentionRows
from kernels.prefix_group import PrefixGroup
from kernels.triton.attention_launch import (
    AttentionLaunch,
    prefill_launch,
    saves_blocks,
    shared_prefix_launch,
    shared_prefix_split_tokens,
)
from kernels.triton.target import compute_capability, num_multiprocessors

# Blocks of 16 are for decode: most chunks have more pairs, and at 256 dims the kernel that writes no parts spills.
_MIN_CHUNK_PAIRS = 17


@dataclass(frozen=True, eq=False)
class SharedPrefixPlan:
    """Attention over the keys that groups share, as a list of programs, and what that leaves to the rows."""

    launch: AttentionLaunch  # of the kernel over the shared keys
    programs: torch.Tensor  # [num_programs, 6], int32: see `_shared_prefix_kernel`
    own_starts: torch.Tensor  # [num_rows], int32: the keys before are left to the row's group; 0 outside groups
    split_tokens: int  # shared keys of a part
    max_parts: int  # parts of the longest prefix
    max_own_tokens: int  # keys of the row with the most keys from its own start on

    @classmethod
    def build(
        cls,
        rows: AttentionRows,
        groups: Sequence[PrefixGroup],
        heads_per_kv_head: int,
        launch: AttentionLaunch,
        split_tokens: int,
    ) -> SharedPrefixPlan:
        """One upload, from pinned memory and without a sync: 4 bytes a row and 24 a program."""
        query_starts = [0, *accumulate(rows.query_lens)]
        own_starts = [0] * rows.num_rows
        programs: list[tuple[int, ...]] = []
        for first_row, num_rows, num_tokens in groups:
            end_row = first_row + num_rows
            own_starts[first_row:end_row] = [num_tokens] * num_rows
            query_end = query_starts[end_row]
            pairs = range(query_starts[first_row] * heads_per_kv_head, query_end * heads_per_kv_head, launch.block_m)
            for part, start in enumerate(range(0, num_tokens, split_tokens)):  # programs of the same keys side by side
                end = min(start + split_tokens, num_tokens)
                programs += [(first_row, first_pair, query_end, start, end, part) for first_pair in pairs]
        device = rows.seq_lens.device
        table = torch.tensor(
            [*own_starts, *chain.from_iterable(programs)], dtype=torch.int32, pin_memory=device.type == "cuda"
        ).to(device, non_blocking=True)
        return cls(
            launch=launch,
            programs=table[rows.num_rows :].view(-1, 6),
            own_starts=table[: rows.num_rows],
            split_tokens=split_tokens,
            max_parts=max(-(-group.num_tokens // split_tokens) for group in groups),
            max_own_tokens=max(kv_len - start for kv_len, start in zip(rows.kv_lens, own_starts, strict=True)),
        )


def plan_decode(q: torch.Tensor, num_kv_heads: int, rows: AttentionRows) -> SharedPrefixPlan | None:
    """The plan for rows of one query, their prefixes split over programs; None where no rows share any.

    q [num_rows, num_heads, head_dim].
    """
    num_heads, head_dim = q.shape[1:]
    heads_per_kv_head = num_heads // num_kv_heads

    def make() -> SharedPrefixPlan:
        num_pairs = [group.num_rows * heads_per_kv_head for group in rows.prefix_groups]
        launch = shared_prefix_launch(max(num_pairs), head_dim, q.element_size(), compute_capability())
        num_programs = num_kv_heads * sum(-(-count // launch.block_m) for count in num_pairs)
        max_tokens = max(group.num_tokens for group in rows.prefix_groups)
        split_tokens = shared_prefix_split_tokens(
            launch.block_m, num_programs, max_tokens, num_multiprocessors(q.device)
        )
        return SharedPrefixPlan.build(rows, rows.prefix_groups, heads_per_kv_head, launch, split_tokens)

    if not rows.prefix_groups:
        return None
    return rows.once(("shared_prefix_decode", num_kv_heads, num_heads, head_dim, q.element_size()), make)


def plan_prefill(q: torch.Tensor, num_kv_heads: int, rows: AttentionRows) -> SharedPrefixPlan | None:
    """The plan for chunks, no prefix split; None where no group's queries take fewer programs together than apart.

    q [num_queries, num_heads, head_dim].
    """
    num_heads, head_dim = q.shape[1:]
    heads_per_kv_head = num_heads // num_kv_heads

    def make() -> SharedPrefixPlan | None:
        options = (head_dim, q.element_size(), compute_capability())
        block_m, groups, max_pairs = prefill_launch(*options).block_m, [], _MIN_CHUNK_PAIRS
        for group in rows.prefix_groups:
            query_lens = rows.query_lens[group.first_row : group.first_row + group.num_rows]
            num_pairs = [query_len * heads_per_kv_head for query_len in query_lens]
            if saves_blocks(num_pairs, block_m):
                groups.append(group)
                max_pairs = max(max_pairs, sum(num_pairs))
        if not groups:
            return None
        launch = shared_prefix_launch(max_pairs, *options)
        split_tokens = max(group.num_tokens for group in groups)
        return SharedPrefixPlan.build(rows, groups, heads_per_kv_head, launch, split_tokens)

    if not rows.prefix_groups:
        return None
    return rows.once(("shared_prefix_prefill", num_kv_heads, num_heads, head_dim, q.element_size()), make)
