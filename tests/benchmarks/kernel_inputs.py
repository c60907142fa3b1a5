"""Defines a case of the kernel benchmark, and makes the inputs of attention and of expert layers.

A case is one operation at one shape: what is run, what it is compared with, and what the hardware must do at least.
For the libraries in comparison the paged cache also exists as contiguous keys and values, and expert layers also as
PyTorch operations. Routing is uniform. Every operation also has cases that compare it with its reference.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  (the customary name)

from engine.kv_cache.tensors import KVCacheSpec, KVCacheTensors
from kernels import cpu, reference
from kernels.operands import AttentionRows, ExpertLayout, PrefixGroup, RoutedExperts
from tests.support.tensors import assert_close, framed, make_paged_cache, routing

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


# An operation's results from inputs on a device; the second argument is a device's implementation.
Results = Sequence[torch.Tensor]


@dataclass(frozen=True)
class OperationCase:
    """An operation at one shape with inputs whose padding is NaN, and what its results are held against."""

    name: str
    operation: str
    inputs: tuple[Any, ...]  # on the CPU
    call: Callable[..., Results]  # of an implementation and the inputs
    peer: Any = reference
    most_different: int | None = None  # elements that may differ at all; None: close to rounding

    def run(self, ops: Any, device: torch.device) -> Results:
        """The results of an implementation, from copies of the inputs."""
        return self.on(device)(ops)

    def on(self, device: torch.device) -> Callable[[Any], Results]:
        """Move the inputs, once; the function is `run` there, each time from fresh copies."""
        held = [Framed(v.tensor.to(device)) if isinstance(v, Framed) else _on_device(v, device) for v in self.inputs]
        return lambda ops: self.call(ops, *(_on_device(value, device) for value in held))

    def compare(self, found: torch.Tensor, wanted: torch.Tensor) -> None:
        """Raise AssertionError where a result is not what it must be."""
        if self.most_different is None:
            assert_close(found, wanted)
        elif (num_different := int((found != wanted).sum())) > self.most_different:
            raise AssertionError(f"{num_different} elements differ; accepted: {self.most_different}")


class Framed(NamedTuple):
    """A tensor that lies in a larger buffer of NaN."""

    tensor: torch.Tensor


def _on_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, Framed):
        return framed(value.tensor.to(device))
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    if isinstance(value, RoutedExperts):
        return RoutedExperts(*(tensor.to(device) for tensor in value))
    if isinstance(value, AttentionRows):
        tensors = (value.block_tables.to(device), value.cu_seqlens_q.to(device), value.seq_lens.to(device))
        return AttentionRows(*tensors, value.query_lens, value.kv_lens, value.prefix_groups)
    return value


def operation_cases(dtype: torch.dtype, *, is_tiny: bool) -> list[OperationCase]:
    """Every operation, at the shapes of decode and prefill steps of Qwen3, or at tiny ones; names are unique."""
    return [*_row_cases(dtype, is_tiny), *_attention(dtype, is_tiny), *_experts(dtype, is_tiny), *_sampling(is_tiny)]


def _normal(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _row_cases(dtype: torch.dtype, is_tiny: bool) -> Iterator[OperationCase]:
    hidden, heads, kv_heads, dim, blocks = (40, 4, 2, 16, 3) if is_tiny else (4096, 32, 8, 128, 600)
    norm = 1 + 0.1 * _normal(hidden, seed=2)
    for rows in (3,) if is_tiny else (64, 4100):
        x, gate = Framed(_normal(rows, hidden, dtype=dtype)), Framed(_normal(rows, 6 * hidden, seed=4, dtype=dtype))
        residual, weight = _normal(rows, hidden, seed=3, dtype=dtype), norm.to(dtype)
        matrix = _normal(hidden, hidden, seed=5, dtype=dtype).mul(0.02)
        yield _case(f"linear {rows}", (x, matrix), lambda ops, x, w: [ops.linear(x, ops.pack(w))])
        yield _case(f"rms_norm {rows}", (x, weight), lambda ops, x, w: [ops.rms_norm(x, w, EPS)])
        yield _case(
            f"fused_add_rms_norm {rows}",
            (x, residual, weight),
            lambda ops, x, r, w: [ops.fused_add_rms_norm(x, r, w, EPS), r],
        )
        yield _case(f"silu_and_mul {rows}", (gate,), lambda ops, g: [ops.silu_and_mul(g)])
        slots = torch.randperm(blocks * BLOCK_SIZE, generator=torch.Generator().manual_seed(rows))[:rows]
        cache = torch.full((2, blocks, BLOCK_SIZE, kv_heads, dim), torch.nan, dtype=dtype)
        angles = torch.arange(blocks * BLOCK_SIZE)[:, None] * 0.1 ** torch.linspace(0, 3, dim // 2)
        head_norm = 1 + 0.1 * _normal(dim, seed=6)
        yield _case(
            f"qk_norm_rope_store_kv {rows}",
            (
                _normal(rows, (heads + 2 * kv_heads) * dim, seed=7, dtype=dtype),
                head_norm.to(dtype),
                torch.cat((angles.cos(), angles.sin()), dim=-1),
                slots,
                cache,
            ),
            lambda ops, qkv, w, cos_sin, slots, cache: [
                ops.qk_norm_rope_store_kv(qkv, (w, w, EPS), cos_sin, slots, *cache, slots),
                cache,
            ],
        )


def _case(name: str, inputs: tuple[Any, ...], call: Callable[..., Results], **more: Any) -> OperationCase:
    """The first word of a name is the operation."""
    return OperationCase(name, name.partition(" ")[0], inputs, call, **more)


def _attention(dtype: torch.dtype, is_tiny: bool) -> Iterator[OperationCase]:
    long, heads, kv_heads, dim = (300, 4, 2, 16) if is_tiny else (4096, 32, 8, 128)
    ragged = [(1, max(long * (row + 1) // 64, 1)) for row in range(64)]
    steps: dict[str, tuple[str, list[tuple[int, int]], list[tuple[int, int, int]]]] = {
        "of one row": ("decode", [(1, long)], []),
        "of short rows": ("decode", [(1, 17)] * (140 if is_tiny else 70), []),
        "of ragged rows": ("decode", [(1, 5), (1, long)] if is_tiny else ragged, []),
        "of rows that share": ("decode", [(1, 200)] * 9, [(0, 8, 128)]),
        "of chunks": ("prefill", [(5, 40), (1, 33)] if is_tiny else [(512, long), (100, 100), (1, 700)], []),
        "of chunks that share": ("prefill", [(3, 200)] * 12, [(0, 12, 128)]),
    }
    if is_tiny:  # 264 programs of a row and a head block are not split
        del steps["of ragged rows"]
    for words, (kind, lens, groups) in steps.items():
        cache = make_paged_cache(
            lens, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, dtype=dtype, prefix_groups=groups
        )
        operation = f"paged_{kind}_attention"
        yield _case(
            f"{operation} {words}",
            (cache.q, cache.k_cache, cache.v_cache, cache.rows),
            lambda ops, *given, operation=operation: [getattr(ops, operation)(*given, dim**-0.5)],
        )


def _experts(dtype: torch.dtype, is_tiny: bool) -> Iterator[OperationCase]:
    experts, top_k, hidden, width = (16, 8, 48, 16) if is_tiny else (128, 8, 2048, 768)
    scales = 0.02 * (1 + torch.arange(experts) / experts).view(-1, 1, 1)  # one expert's draw, scaled: 128 take seconds
    gate_up, down = (
        (_normal(1, *shape, seed=8) * scales).to(dtype) for shape in ((2 * width, hidden), (hidden, width))
    )
    # Tokens: few, of one row an expert, and enough that pairs are counted instead of scanned.
    for tokens in (2, 520) if is_tiny else (1, 64, 1024):
        x, logits = _normal(tokens, hidden, dtype=dtype), _normal(tokens, experts, seed=9, dtype=dtype)
        routed = routing(tokens, experts, top_k, torch.device("cpu"))
        rows = _normal(tokens * top_k, hidden, seed=10, dtype=dtype)
        yield _case(f"route_topk {tokens}", (logits,), lambda ops, x: [*ops.route_topk(x, top_k, renormalise=True)])
        yield _case(
            f"sort_tokens_by_expert {tokens}",
            (routed.expert_ids,),
            lambda ops, ids: [(found := ops.sort_tokens_by_expert(ids, experts)).pair_ids, found.expert_offsets],
        )
        yield _case(
            f"route_and_sort {tokens}",
            (logits,),
            lambda ops, x: [(found := ops.route_and_sort(x, top_k, renormalise=True))[0], found[1].pair_ids],
        )
        yield _case(
            f"combine_experts {tokens}",
            (rows, routed),
            lambda ops, rows, routed: [
                ops.combine_experts(rows, ops.sort_tokens_by_expert(routed.expert_ids, experts), routed.weights)
            ],
        )
        if tokens == 520:
            continue  # products of so many rows take the interpreter minutes
        yield _case(
            f"grouped_gemm {tokens}",
            (Framed(x), gate_up, routed.expert_ids),
            lambda ops, x, w, ids: [
                ops.grouped_gemm(x, ops.pack(w), ops.sort_tokens_by_expert(ids, experts), gather=True, gated=True)
            ],
        )
        if tokens < 64:
            yield _case(
                f"moe_small_batch {tokens}",
                (x, gate_up, down, routed),
                lambda ops, x, g, d, routed: [ops.moe_small_batch(x, ops.pack(g), ops.pack(d), routed)],
            )


def _sampling(is_tiny: bool) -> Iterator[OperationCase]:
    rows, vocab = (2, 300) if is_tiny else (64, 151_936)
    logits = 4 * _normal(rows, vocab, seed=11)
    ids = torch.arange(rows)
    pairs = torch.arange(min(1000, vocab)), torch.zeros(min(1000, vocab), dtype=torch.int64)
    top = (torch.full((rows,), 50), torch.full((rows,), 0.9), torch.full((rows,), 0.02))
    ones = torch.ones(rows)
    yield _case("argmax", (logits,), lambda ops, x: [ops.argmax(x)])
    yield _case("gumbel_argmax", (logits, ids, ids), lambda ops, *given: [ops.gumbel_argmax(*given)], peer=cpu)
    drawn = (logits, torch.arange(vocab) % 7 > 0, ids % 2 * ones, ids, ids)
    yield _case("choose_tokens", drawn, lambda ops, *given: [ops.choose_tokens(*given)], peer=cpu)
    yield _case(
        "apply_penalties",
        (logits, pairs[1], pairs[0], pairs[1].int() + 1, 1.2 * ones, 0.5 * ones, 0.25 * ones),
        lambda ops, x, *given: [x, ops.apply_penalties(x, *given)][:1],
        peer=cpu,
    )
    # The sum of 150,000 shares rounds: a token at the edge of a row's nucleus may fall on either side.
    yield _case(
        "mask_top_k_top_p_min_p",
        (logits, *top),
        lambda ops, x, *given: [(ops.mask_top_k_top_p_min_p(x, *given), x > -torch.inf)[1]],
        peer=cpu,
        most_different=0 if is_tiny else rows,
    )
