"""Defines a case of the kernel benchmark, and makes the inputs of attention and of expert layers.

A case is one operation at one shape: what is run, what it is compared with, and what the hardware must do at least.
For the libraries in comparison the paged cache also exists as contiguous keys and values, and expert layers also as
PyTorch operations. Routing is uniform.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812  (the customary name)

from engine.kv_cache.tensors import KVCacheSpec, KVCacheTensors
from kernels.operands import AttentionRows, ExpertLayout, PrefixGroup, RoutedExperts

Bound = Literal["bandwidth", "matmul"]

DTYPE = torch.bfloat16

BLOCK_SIZE = 16

WEIGHT_SCALE = 0.02  # so that products of 2,048 terms stay near 1

EPS = 1e-6


@dataclass(frozen=True)
class Workload:
    """A case whose tensors are allocated, ready to run."""

    amount: int  # bytes that must move, or FLOP that must be done
    formula: str  # how the amount is computed
    run: Callable[[], torch.Tensor]
    libraries: Mapping[str, Callable[[], torch.Tensor]] = field(default_factory=dict)  # the same result, by others
    restore: Callable[[], None] | None = None  # undoes what run does in place; not timed


Prepare = Callable[[torch.device], Workload]


@dataclass(frozen=True)
class Case:
    """A case whose tensors are not allocated yet: only one at a time fits a GPU."""

    operation: str  # name in `kernels.interface`, or a chain of them joined by +
    models: str
    shape: str
    bound: Bound  # what the amount is compared with
    prepare: Prepare
    goal_percent: float | None = None  # of the bound, on an H200 or, of a CPU's cases, on any


def beside(ours: Case, theirs: Case) -> Case:
    """Ours with theirs, the same case by other operations and with inputs of its own, as the one library."""

    def prepare(device: torch.device) -> Workload:
        work, other = ours.prepare(device), theirs.prepare(device)

        def restore() -> None:
            for each in (work.restore, other.restore):
                if each is not None:
                    each()

        return replace(work, libraries={"kernels.cpu": other.run}, restore=restore)

    return replace(ours, prepare=prepare)


@dataclass(frozen=True)
class Sizes:
    """Token counts that all cases share. The goals hold for the defaults on a GPU, and for CPU_SIZES."""

    few_tokens: int = 64  # a decode step
    many_tokens: int = 8192  # a prefill step
    context_tokens: int = 4096
    chunk_tokens: int = 512  # queries of a prefill over a cached prefix
    penalised_tokens: int = 1024  # of one row
    pass_goal_percent: float = 85.0  # of the bandwidth, for one pass over what a prefill step has


CPU_SIZES = Sizes(many_tokens=2048, pass_goal_percent=70.0)


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of a model that its operations see, named as in `kernels.interface`."""

    name: str
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int  # of one expert where there are experts
    vocab_size: int
    head_dim: int = 128
    num_experts: int = 0  # 0: dense
    experts_per_token: int = 0
    qk_norm: bool = True

    @property
    def qkv_width(self) -> int:
        """Width of queries, keys and values together."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


MODELS = (
    ModelShape("Qwen3-0.6B", 1024, 16, 8, 3072, 151936),
    ModelShape("Qwen3-8B", 4096, 32, 8, 12288, 151936),
    ModelShape("Qwen3-30B-A3B", 2048, 32, 4, 768, 151936, num_experts=128, experts_per_token=8),
    ModelShape("Llama-3-8B", 4096, 32, 8, 14336, 128256, qk_norm=False),
)

# With the heads of the small models that CPUs run, and of those of 7 to 30 billion parameters.
CPU_MODELS = (
    ModelShape("Qwen3-0.6B", 1024, 16, 8, 3072, 151936),
    ModelShape("190 M Qwen3-MoE", 512, 8, 2, 384, 32768, head_dim=64, num_experts=32, experts_per_token=4),
    ModelShape("Qwen3-8B", 4096, 32, 8, 12288, 151936),
    ModelShape("Qwen3-30B-A3B", 2048, 32, 4, 768, 151936, num_experts=128, experts_per_token=8),
)


def distinct(models: Iterable[ModelShape], key: Callable[[ModelShape], Hashable]) -> Iterator[tuple[str, ModelShape]]:
    """One model of each set that looks the same to an operation, with the names of all of the set."""
    groups: dict[Hashable, list[ModelShape]] = {}
    for model in models:
        groups.setdefault(key(model), []).append(model)
    for alike in groups.values():
        yield ", ".join(model.name for model in alike), alike[0]


def random(*shape: int, device: torch.device, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    """Normally distributed values, drawn on `device`: a head's weight would take seconds on a CPU."""
    return torch.randn(*shape, device=device, dtype=dtype)


def copy_back(target: torch.Tensor, source: torch.Tensor) -> None:
    """Undo what was done to target in place."""
    target.copy_(source)


def shuffled(size: int, device: torch.device) -> torch.Tensor:
    """0 .. size - 1 in random order, int64."""
    return torch.randperm(size, device=device)


class AttentionInputs:
    """Queries and a paged cache whose blocks are in random order, as after hours of use.

    If group_rows is above 1, each group_rows rows share the blocks of their first shared_tokens keys.
    """

    def __init__(
        self,
        model: ModelShape,
        query_lens: tuple[int, ...],
        kv_lens: tuple[int, ...],
        device: torch.device,
        group_rows: int = 1,
        shared_tokens: int = 0,
    ) -> None:
        num_used = [-(-kv_len // BLOCK_SIZE) for kv_len in kv_lens]
        self.q = random(sum(query_lens), model.num_heads, model.head_dim, device=device)
        shape = (sum(num_used) + 1, BLOCK_SIZE, model.num_kv_heads, model.head_dim)
        # As the engine's: on a CPU huge pages decide, since keys and values take some hundred MiB.
        spec = KVCacheSpec(1, BLOCK_SIZE, model.num_kv_heads, model.head_dim, DTYPE)
        kv_cache = KVCacheTensors.allocate(spec, shape[0], device)
        self.k, self.v = (cache[0].copy_(random(*shape, device=device)) for cache in (kv_cache.keys, kv_cache.values))
        self.scale = model.head_dim**-0.5
        blocks = torch.split(shuffled(sum(num_used), device) + 1, num_used)
        tables = torch.zeros(len(kv_lens), max(num_used), dtype=torch.int32, device=device)
        for row, row_blocks in enumerate(blocks):
            tables[row, : num_used[row]] = row_blocks
        first_rows = range(0, len(kv_lens), group_rows)
        for row in first_rows:  # the blocks that the others had in their place are left unused
            tables[row : row + group_rows, : shared_tokens // BLOCK_SIZE] = tables[row, : shared_tokens // BLOCK_SIZE]
        self.rows = AttentionRows(
            block_tables=tables,
            cu_seqlens_q=_starts(query_lens, device),
            seq_lens=torch.tensor(kv_lens, dtype=torch.int32, device=device),
            query_lens=query_lens,
            kv_lens=kv_lens,
            prefix_groups=tuple(PrefixGroup(row, group_rows, shared_tokens) for row in first_rows if shared_tokens),
        )
        self.cu_seqlens_k = _starts(kv_lens, device)
        slots = torch.cat(
            [
                (table[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=device)).flatten()[:kv_len]
                for table, kv_len in zip(tables, kv_lens, strict=True)
            ]
        )
        # [sum of kv_lens, Hkv, D] each
        self.contiguous = (self.k.flatten(0, 1)[slots], self.v.flatten(0, 1)[slots])


def last_slots(rows: AttentionRows, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Position of each row's last token, and its slot: [num_rows] int64 each."""
    positions = rows.seq_lens.long() - 1
    blocks = rows.block_tables.gather(1, (positions // block_size)[:, None]).squeeze(1)
    return positions, blocks.long() * block_size + positions % block_size


def _starts(lens: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device)


class ExpertInputs:
    """The tensors of one expert layer in one step, and the layer's operations by PyTorch."""

    def __init__(self, model: ModelShape, num_tokens: int, device: torch.device) -> None:
        self.num_experts, self.top_k = model.num_experts, model.experts_per_token
        hidden, width = model.hidden_size, model.intermediate_size
        self.x = random(num_tokens, hidden, device=device)
        self.logits = random(num_tokens, self.num_experts, device=device)
        self.gate_up = random(self.num_experts, 2 * width, hidden, device=device).mul_(WEIGHT_SCALE)
        self.down = random(self.num_experts, hidden, width, device=device).mul_(WEIGHT_SCALE)
        self.routed = self.route()
        self.layout = self.sort()
        self.group_ends = self.layout.expert_offsets[1:].int()
        self.pair_tokens = self.layout.pair_ids // self.top_k
        self.num_pairs = num_tokens * self.top_k
        self.num_reached = int((self.routed.expert_ids.flatten().bincount() > 0).sum())

    def route(self) -> RoutedExperts:
        """As `route_topk` with renormalised weights."""
        weights, ids = torch.softmax(self.logits.float(), dim=-1).topk(self.top_k, dim=-1)
        return RoutedExperts(weights / weights.sum(dim=-1, keepdim=True), ids)

    def sort(self) -> ExpertLayout:
        """As `sort_tokens_by_expert`, without waiting for the GPU."""
        ordered, pair_ids = self.routed.expert_ids.flatten().sort(stable=True)
        experts = torch.arange(self.num_experts + 1, device=ordered.device)
        return ExpertLayout(pair_ids, torch.searchsorted(ordered, experts), self.top_k)

    def grouped_gate_up(self) -> torch.Tensor:
        """As `grouped_gemm` with gather."""
        return F.grouped_mm(self.x[self.pair_tokens], self.gate_up.transpose(-2, -1), offs=self.group_ends)

    def grouped_down(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `grouped_gemm` without gather."""
        return F.grouped_mm(hidden, self.down.transpose(-2, -1), offs=self.group_ends)

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """As `combine_experts`, but with weights rounded to the model's dtype, so that it is one product."""
        by_pair = torch.empty_like(rows)
        by_pair[self.layout.pair_ids] = rows
        weights = self.routed.weights.to(rows.dtype)[:, None]
        return torch.bmm(weights, by_pair.view(-1, self.top_k, rows.shape[1])).squeeze(1)

    def experts(self) -> torch.Tensor:
        """The layer after routing, with the layout of the first routing."""
        self.sort()
        gate, up = self.grouped_gate_up().chunk(2, dim=-1)
        return self.combine(self.grouped_down(F.silu(gate).mul_(up)))

    def layer(self) -> torch.Tensor:
        """The whole layer, from the router's logits."""
        self.route()
        return self.experts()
