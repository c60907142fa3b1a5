"""What operations take beside tensors: packed weights, the rows of an attention call, and tokens routed to experts.

And the memory that weights and the KV cache of a CPU lie in.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import ClassVar, NamedTuple, Self, TypeVar, cast

import torch

Plan = TypeVar("Plan")
HUGE_PAGE_BYTES = 2 << 20  # of Linux on x86-64; and on arm64 with pages of 4 KiB


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight in the layout that one implementation reads fastest: made by its `pack`, read by its products alone."""

    parts: tuple[torch.Tensor, ...]  # what they are is the implementation's business
    shape: tuple[int, ...]  # of the weight it was made from: [N, K], or [E, N, K] for experts

    has_rows: ClassVar[bool] = False  # whether `rows` reads this layout, too

    @classmethod
    def unchanged(cls, weight: torch.Tensor) -> Self:
        """The tensor itself as the one part."""
        return cls((weight,), tuple(weight.shape))

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that `unchanged` was given. Raises ValueError if there are more parts than one."""
        (tensor,) = self.parts
        return tensor

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows of a weight [N, K], to the bit: indices [T] int64, 0 to N - 1, which is not checked -> [T, K].

        Of the tensor that `unchanged` was given, and of layouts that say so (`has_rows`).
        """
        return torch.nn.functional.embedding(indices, self.tensor)

    @cached_property
    def matrices(self) -> tuple[torch.Tensor, ...]:
        """Each expert's matrix of a weight [E, N, K]: its part, or a view of the tensor that `unchanged` was given.

        Made once: a view costs 3 us, and a layer of 128 experts may need 256. Raises ValueError where an expert has
        more parts than one.
        """
        if len(self.parts) == self.shape[0] and self.parts[0].dim() == 2:
            return self.parts
        return self.tensor.unbind()

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(part.nbytes for part in self.parts)


class KeyRange(NamedTuple):
    """Tokens start .. end - 1 of a row, seen by one query."""

    row: int
    query: int  # index into q
    start: int  # a multiple of block_size, unless it is where a window begins
    end: int
    segment: int = 0  # which of those that its row is cut into
    num_skipped: int = 0  # of its first tokens, which are not seen after all

    @property
    def num_tokens(self) -> int:
        """Number of keys."""
        return self.end - self.start


class PrefixGroup(NamedTuple):
    """Rows `first_row` .. `first_row + num_rows - 1` of an `AttentionRows` begin with the same blocks, which hold
    `num_tokens` tokens.

    Every query of these rows sees all of these keys. So attention over them may be computed for all members at once,
    each key read once, and merged with each member's attention over the keys from `num_tokens` on (Hydragen, arXiv
    2402.05099). An implementation may ignore groups: the result is the same up to rounding.
    """

    first_row: int  # index into the rows
    num_rows: int  # >= 2
    num_tokens: int  # > 0, a multiple of block_size, <= kv_lens[i] - query_lens[i] of each member i


@dataclass(frozen=True, eq=False)
class AttentionRows:
    """Requests of one step that attend together. Lengths are on the host as well, so a launch waits for no device.

    Row i owns queries `cu_seqlens_q[i]:cu_seqlens_q[i+1]`; they are the last queries of its sequence, whose
    `seq_lens[i]` keys (these queries' own included) are already in the paged cache. A decode row has one query.
    """

    block_tables: torch.Tensor  # [num_rows, max_blocks], int32; entries past a row's blocks: any of the pool's
    cu_seqlens_q: torch.Tensor  # [num_rows + 1], int32, starts at 0
    seq_lens: torch.Tensor  # [num_rows], int32, tokens in KV after this step, >= number of queries of the row
    query_lens: tuple[int, ...]  # the same as cu_seqlens_q's differences, on the host
    # The same as seq_lens, on the host. On a GPU they may be upper bounds: a captured launch is sized once for all.
    kv_lens: tuple[int, ...]
    # Rows that begin with the same blocks, in rising order. A row is in one group or in none.
    prefix_groups: tuple[PrefixGroup, ...] = ()
    # The last keys that a query sees, its own included; None: all before it. Blocks that no query sees are not read:
    # their entries in block_tables may be any of the pool's. Such rows are in no group.
    window: int | None = None
    soft_cap: float | None = None  # c: a score s, which is scaled already, becomes c * tanh(s / c); None: it stays
    # [Hq], float32: one more score of each query head, which takes its share of the softmax and has no value, so that
    # what the keys get sums to less than 1. None: there is none.
    sinks: torch.Tensor | None = None
    # [2, Hkv], float32, above 0: what the elements of keys, then of values, are multiplied by, where the caches are in
    # float8 e4m3; None: they are in the model dtype.
    kv_scales: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Number of requests."""
        return len(self.kv_lens)

    @property
    def num_queries(self) -> int:
        """Number of query tokens over all rows."""
        return sum(self.query_lens)

    @cached_property
    def own_starts(self) -> tuple[int, ...]:
        """The first key of each row after its group's prefix; 0 for a row in no group."""
        starts = [0] * self.num_rows
        for group in self.prefix_groups:
            starts[group.first_row : group.first_row + group.num_rows] = [group.num_tokens] * group.num_rows
        return tuple(starts)

    def windowed(self, window: int) -> AttentionRows:
        """The same rows for layers whose queries see so many keys; made once, with plans of its own."""
        return self.once(("windowed", window), lambda: replace(self, prefix_groups=(), window=window))

    def scored(self, soft_cap: float | None, sinks: torch.Tensor | None) -> AttentionRows:
        """The same rows for a layer with a soft cap or sinks [Hq] float32, with the plans of these."""
        return self if soft_cap is None and sinks is None else self._for_layer(soft_cap=soft_cap, sinks=sinks)

    def scaled(self, kv_scales: torch.Tensor | None) -> AttentionRows:
        """The same rows for a layer whose caches have these scales, with the plans of these: no plan asks for them."""
        return self if kv_scales is None else self._for_layer(kv_scales=kv_scales)

    def _for_layer(self, **changes: float | torch.Tensor | None) -> AttentionRows:
        _ = self._plans  # made before they are shared
        rows = replace(self, **changes)  # type: ignore[arg-type]
        vars(rows).update({name: value for name, value in vars(self).items() if name not in vars(rows)})
        return rows

    @cached_property
    def max_seen(self) -> int:
        """The most keys that one query of a row sees."""
        longest = max(self.kv_lens, default=0)
        return longest if self.window is None else min(longest, self.window)

    def first_key(self, row: int) -> int:
        """The first key that any query of a row sees."""
        if self.window is None:
            return 0
        return max(self.kv_lens[row] - max(self.query_lens[row], 1) + 1 - self.window, 0)

    @cached_property
    def single_query_keys(self) -> tuple[KeyRange, ...]:
        """The keys, from its own start on, of each row that has one query and such keys; with a window, those in it."""
        queries = accumulate(self.query_lens, initial=0)
        starts = self.own_starts if self.window is None else map(self.first_key, range(self.num_rows))
        lens = zip(self.query_lens, queries, starts, self.kv_lens, strict=False)
        return tuple(
            KeyRange(row, query, start, kv_len)
            for row, (query_len, query, start, kv_len) in enumerate(lens)
            if query_len == 1 and start < kv_len
        )

    def once(self, key: tuple[str | int, ...], make: Callable[[], Plan]) -> Plan:
        """What `make` returns, made once for all layers of the step. key: tells it from what else is kept."""
        if key not in self._plans:
            self._plans[key] = make()
        return cast("Plan", self._plans[key])

    @cached_property
    def _plans(self) -> dict[tuple[str | int, ...], object]:
        return {}


class ScoreRule(NamedTuple):
    """How the product of a query and a key becomes a score."""

    scale: float
    soft_cap: float | None = None  # as of `AttentionRows`


class ProjectedHeads(NamedTuple):
    """The heads of a step's tokens as projected, and where they go: the arguments of
    `Operations.qk_norm_rope_store_kv`, which says what each is.
    """

    qkv: torch.Tensor
    qk_norm: tuple[torch.Tensor, torch.Tensor, float] | None
    cos_sin: torch.Tensor
    positions: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slot_mapping: torch.Tensor
    kv_scales: torch.Tensor | None = None


class RoutedExperts(NamedTuple):
    """The experts of each token and their weights."""

    weights: torch.Tensor  # [num_tokens, top_k], float32
    expert_ids: torch.Tensor  # [num_tokens, top_k], int64; ties go to the lower id


class Truncation(NamedTuple):
    """Which tokens of each row are dropped before a draw, in this order, by scores that are divided by the temperature.

    As transformers' warpers do, order and rounding too. Of equal scores at the nucleus' edge the lower ids stay
    (transformers sorts unstably: its choice is arbitrary). Not read for a row without a draw.
    """

    top_k: torch.Tensor  # [N], int64, V: off
    top_p: torch.Tensor  # [N], float32, 1: off; the nucleus, arXiv 1904.09751
    min_p: torch.Tensor  # [N], float32, 0: off; arXiv 2407.01082


class ExpertRun(NamedTuple):
    """One expert's rows, which lie side by side in an `ExpertLayout`."""

    expert: int
    num_rows: int  # at least 1


@dataclass(frozen=True, eq=False)
class ExpertLayout:
    """The (token, choice) pairs of a layer ordered by expert.

    Pair p stands for token `p // top_k` and its choice `p % top_k`.
    """

    pair_ids: torch.Tensor  # [num_tokens * top_k], int64: pairs ordered by expert, stable within one expert
    expert_offsets: torch.Tensor  # [num_experts + 1], int64: expert e owns pair_ids[offsets[e]:offsets[e+1]]
    top_k: int
    places: torch.Tensor | None = None  # [num_tokens * top_k], int32: the row of each pair; None: not wanted
    tiles: torch.Tensor | None = None  # which rows each program of a product takes; only `kernels.triton` has them
    tile_rows: int = 0  # most rows of a tile

    @cached_property
    def runs(self) -> tuple[ExpertRun, ...]:
        """The experts that have rows, in order. Waits for the device."""
        counts = enumerate(self.expert_offsets.diff().tolist())
        return tuple(ExpertRun(expert, num_rows) for expert, num_rows in counts if num_rows)

    @cached_property
    def run_lens(self) -> list[int]:
        """Number of rows of each run."""
        return [run.num_rows for run in self.runs]


class ExpertOutputs(NamedTuple):
    """What a layer's experts answered, not added up yet: the arguments of `Operations.combine_experts`."""

    rows: torch.Tensor  # [num_tokens * top_k, H], model dtype, in the layout's order
    layout: ExpertLayout
    weights: torch.Tensor  # [num_tokens, top_k], float32


def refuse_float8(k_cache: torch.Tensor, v_cache: torch.Tensor, kv_scales: torch.Tensor | None) -> None:
    """Raise ValueError for caches in float8, or scales of such, where an implementation has none."""
    if kv_scales is not None or torch.float8_e4m3fn in (k_cache.dtype, v_cache.dtype):
        raise ValueError(
            f"caches in {k_cache.dtype} and {v_cache.dtype} with{'out' if kv_scales is None else ''} scales; accepted "
            "here: caches in the model dtype, without"
        )


def in_huge_pages(num_bytes: int) -> torch.Tensor:
    """Zeros, [num_bytes] uint8, that begin with a huge page where the system has them; what does not fill one lies in
    small ones. A page takes memory when it is first written. Raises MemoryError.

    What is read in order from huge pages does not stop at each 4 KiB. They need a mapping of their own, since memory
    that was in use has small pages; less than one is PyTorch's.
    """
    whole = num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if whole == 0:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    mapped_bytes = num_bytes + HUGE_PAGE_BYTES
    try:
        mapping = mmap.mmap(-1, mapped_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{mapped_bytes} bytes: {error}") from error
    memory = torch.frombuffer(mapping, dtype=torch.uint8)  # keeps the mapping
    start = -memory.data_ptr() % HUGE_PAGE_BYTES
    with suppress(AttributeError, OSError):  # no Linux, or one without huge pages: small ones serve, more slowly
        mapping.madvise(mmap.MADV_HUGEPAGE, start, whole)
    return memory[start : start + num_bytes]
