"""Cases that hold each operation against its reference, at the shapes of Qwen3 or at tiny ones, with NaN as padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from kernels import cpu, reference
from kernels.operands import AttentionRows, ExpertOutputs, ProjectedHeads, RoutedExperts, Truncation
from kernels.quantised import LARGEST_FLOAT8, WeightScheme, quantise
from kernels.reference.layers import as_float8
from tests.benchmarks.kernel_inputs import BLOCK_SIZE, EPS, last_slots
from tests.support.tensors import assert_close, framed, make_paged_cache, routing

SCHEMES = (
    WeightScheme(4, is_float=False, group_size=32),
    WeightScheme(8, is_float=False, group_size=None, activations="int8_token"),
    WeightScheme(8, is_float=True, group_size=None),
)
# Activations are rounded to float8 on GPUs that multiply it. The reference leaves them as they are, so the case's are
# float8 numbers already: rounding others differs by 2.6 % of the result (H200).
ROUNDED_TO_FLOAT8 = WeightScheme(8, is_float=True, group_size=None, activations="float8_token")

# A key rounded to e4m3 after two products that round apart may be a step of its 3 bits away, an eighth, but seldom.
FLOAT8_STEPS = {"max_steps": 2.0**20, "rms_steps": 2.0**17}  # of float32

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
        if found.dtype is wanted.dtype is torch.float8_e4m3fn:
            assert_close(found.float(), wanted.float(), **FLOAT8_STEPS)
        elif self.most_different is None:
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
        tensors: dict[str, Any] = {name: x.to(device) for name, x in vars(value).items() if isinstance(x, torch.Tensor)}
        return replace(value, **tensors)
    return value


def operation_cases(dtype: torch.dtype, *, is_tiny: bool) -> list[OperationCase]:
    """Every operation, at the shapes of decode and prefill steps of Qwen3, or at tiny ones; names are unique."""
    cases = [*_row_cases(dtype, is_tiny), *_attention(dtype, is_tiny), *_experts(dtype, is_tiny), *_sampling(is_tiny)]
    return [*cases, *_float8_cache(dtype, is_tiny)] if _knows_float8() else cases


def _knows_float8() -> bool:
    """Whether kernels convert e4m3 here; Triton's interpreter does."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9)


def _normal(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _row_cases(dtype: torch.dtype, is_tiny: bool) -> Iterator[OperationCase]:
    hidden, heads, kv_heads, dim, blocks = (40, 4, 2, 16, 3) if is_tiny else (4096, 32, 8, 128, 600)
    norm = 1 + 0.1 * _normal(hidden, seed=2)
    multiplies_float8 = torch.cuda.is_available() and _knows_float8()
    for rows in (3,) if is_tiny else (64, 4100):
        x, gate = Framed(_normal(rows, hidden, dtype=dtype)), Framed(_normal(rows, 6 * hidden, seed=4, dtype=dtype))
        residual, weight = _normal(rows, hidden, seed=3, dtype=dtype), norm.to(dtype)
        matrix = _normal(hidden, hidden, seed=5, dtype=dtype).mul(0.02)
        yield _case(f"linear {rows}", (x, matrix), lambda ops, x, w: [ops.linear(x, ops.pack(w))])
        depth = 2048 if is_tiny else hidden  # so deep that a GPU reads it in splits
        deep = Framed(_normal(rows, depth, seed=6, dtype=dtype))
        matrix = _normal(hidden, depth, seed=7, dtype=dtype).mul(0.02)
        for scheme in (*SCHEMES, ROUNDED_TO_FLOAT8) if multiplies_float8 else SCHEMES:
            yield _case(
                f"linear {rows}, {scheme}",
                (_float8_numbers(deep) if scheme == ROUNDED_TO_FLOAT8 else deep, matrix, scheme),
                lambda ops, x, w, scheme: [ops.linear(x, ops.pack(quantise(w, scheme, w.dtype)))],
            )
        yield _case(f"rms_norm {rows}", (x, weight), lambda ops, x, w: [ops.rms_norm(x, w, EPS)])
        yield _case(
            f"fused_add_rms_norm {rows}",
            (x, residual, weight),
            lambda ops, x, r, w: [ops.fused_add_rms_norm(x, r, w, EPS), r],
        )
        yield _case(f"silu_and_mul {rows}", (gate,), lambda ops, g: [ops.silu_and_mul(g)])
        yield _case(f"gelu_and_mul {rows}", (gate,), lambda ops, g: [ops.gelu_and_mul(g)])
        yield _case(f"clamped_swiglu {rows}", (gate,), lambda ops, g: [ops.clamped_swiglu(g, 1.702, 7.0)])
        slots = torch.randperm(blocks * BLOCK_SIZE, generator=torch.Generator().manual_seed(rows))[:rows]
        cache = torch.full((2, blocks, BLOCK_SIZE, kv_heads, dim), torch.nan, dtype=dtype)
        head_norm = 1 + 0.1 * _normal(dim, seed=6)
        yield _case(
            f"qk_norm_rope_store_kv {rows}",
            (
                _normal(rows, (heads + 2 * kv_heads) * dim, seed=7, dtype=dtype),
                head_norm.to(dtype),
                _rotations(blocks * BLOCK_SIZE, dim),
                slots,
                cache,
            ),
            lambda ops, qkv, w, cos_sin, slots, cache: [
                ops.qk_norm_rope_store_kv(qkv, (w, w, EPS), cos_sin, slots, *cache, slots),
                cache,
            ],
        )


def _float8_numbers(x: Framed) -> Framed:
    """Activations [T, K] that rounding to float8 by their row's largest magnitude, 448 / 256, leaves as they are."""
    numbers = (x.tensor.float() * 100).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(torch.float8_e4m3fn).float()
    numbers[:, 0] = LARGEST_FLOAT8
    return Framed((numbers / 256).to(x.tensor.dtype))


def _rotations(num_positions: int, dim: int) -> torch.Tensor:
    """[num_positions, dim] float32: a position's cosines, then its sines."""
    angles = torch.arange(num_positions)[:, None] * 0.1 ** torch.linspace(0, 3, dim // 2)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _case(name: str, inputs: tuple[Any, ...], call: Callable[..., Results], **more: Any) -> OperationCase:
    """The first word of a name is the operation."""
    return OperationCase(name, name.partition(" ")[0], inputs, call, **more)


Step = tuple[str, list[tuple[int, int]], list[tuple[int, int, int]]]  # kind, queries and keys of rows, groups


def _heads(is_tiny: bool) -> tuple[int, int, int]:
    return (4, 2, 16) if is_tiny else (32, 8, 128)


def _steps(is_tiny: bool) -> dict[str, Step]:
    long = 300 if is_tiny else 4096
    ragged = [(1, max(long * (row + 1) // 64, 1)) for row in range(64)]
    steps: dict[str, Step] = {
        "of one row": ("decode", [(1, long)], []),
        "of short rows": ("decode", [(1, 17)] * (140 if is_tiny else 70), []),
        "of ragged rows": ("decode", [(1, 5), (1, long)] if is_tiny else ragged, []),
        "of rows that share": ("decode", [(1, 200)] * 9, [(0, 8, 128)]),
        "of chunks": ("prefill", [(5, 40), (1, 33)] if is_tiny else [(512, long), (100, 100), (1, 700)], []),
        "of chunks that share": ("prefill", [(3, 200)] * 12, [(0, 12, 128)]),
    }
    if is_tiny:  # 264 programs of a row and a head block are not split
        del steps["of ragged rows"]
    return steps


def _attention(dtype: torch.dtype, is_tiny: bool) -> Iterator[OperationCase]:
    heads, kv_heads, dim = _heads(is_tiny)
    for words, (kind, lens, groups) in _steps(is_tiny).items():
        cache = make_paged_cache(
            lens, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, dtype=dtype, prefix_groups=groups
        )
        operation = f"paged_{kind}_attention"
        yield _case(
            f"{operation} {words}",
            (cache.q, cache.k_cache, cache.v_cache, cache.rows),
            lambda ops, *given, operation=operation: [getattr(ops, operation)(*given, dim**-0.5)],
        )
        if kind == "decode":
            qkv = _normal(len(lens), (heads + 2 * kv_heads) * dim, seed=7, dtype=dtype)
            norm, rotations = (1 + 0.1 * _normal(dim, seed=6)).to(dtype), _rotations(max(kv for _, kv in lens), dim)
            caches = torch.stack((cache.k_cache, cache.v_cache))
            yield _case(f"store_and_decode {words}", (qkv, norm, rotations, caches, cache.rows), _store_and_decode)


def _store_and_decode(
    ops: Any, qkv: torch.Tensor, norm: torch.Tensor, rotations: torch.Tensor, caches: torch.Tensor, rows: AttentionRows
) -> Results:
    """Each row's last key and value are written over, where the cache has others."""
    positions, slots = last_slots(rows, BLOCK_SIZE)
    keys, values = caches if rows.kv_scales is None else caches.view(torch.float8_e4m3fn)
    heads = ProjectedHeads(qkv, (norm, norm, EPS), rotations, positions, keys, values, slots, rows.kv_scales)
    return [ops.store_and_decode(heads, rows, caches.shape[-1] ** -0.5), keys, values]


def _float8_cache(dtype: torch.dtype, is_tiny: bool) -> Iterator[OperationCase]:
    """Keys and values in float8, with scales that no two heads share: stored, decoded, seen by chunks and by groups."""
    heads, kv_heads, dim = _heads(is_tiny)
    tokens, blocks = (9, 20) if is_tiny else (64, 256)  # of 16 tokens: as many as the longest row has
    scales = torch.stack((0.011 * (1 + torch.arange(kv_heads) / 4), 0.29 / (1 + torch.arange(kv_heads))))
    slots = torch.randperm(blocks * BLOCK_SIZE, generator=torch.Generator().manual_seed(8))[:tokens]
    norm, rotations = (1 + 0.1 * _normal(dim, seed=6)).to(dtype), _rotations(blocks * BLOCK_SIZE, dim)
    qkv = _normal(tokens, (heads + 2 * kv_heads) * dim, seed=7, dtype=dtype)
    unwritten = torch.full((2, blocks, BLOCK_SIZE, kv_heads, dim), 0x7F, dtype=torch.uint8)  # NaN
    stored = (qkv, norm, rotations, slots, unwritten, scales)
    yield _case(f"qk_norm_rope_store_kv {tokens}, float8", stored, _store_float8)
    for words, (kind, lens, groups) in _steps(is_tiny).items():
        if words == "of short rows":  # others are not split either
            continue
        cache = make_paged_cache(
            lens, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, dtype=dtype, prefix_groups=groups
        )
        rounded = (as_float8(c, s[:, None]) for c, s in zip((cache.k_cache, cache.v_cache), scales, strict=True))
        caches, rows = torch.stack([each.view(torch.uint8) for each in rounded]), cache.rows.scaled(scales)
        if kind == "decode":  # two launches, of which the second is that of paged_decode_attention
            inputs = (qkv[: len(lens)], norm, rotations, caches, rows)
            yield _case(f"store_and_decode {words}, float8", inputs, _store_and_decode)
        else:
            yield _case(f"paged_prefill_attention {words}, float8", (cache.q, caches, rows), _prefill_float8)


def _prefill_float8(ops: Any, q: torch.Tensor, caches: torch.Tensor, rows: AttentionRows) -> Results:
    return [ops.paged_prefill_attention(q, *caches.view(torch.float8_e4m3fn), rows, q.shape[-1] ** -0.5)]


def _store_float8(
    ops: Any,
    qkv: torch.Tensor,
    norm: torch.Tensor,
    rotations: torch.Tensor,
    slots: torch.Tensor,
    caches: torch.Tensor,
    scales: torch.Tensor,
) -> Results:
    """Queries, keys, and values as numbers: these are copied, so that theirs are the reference's."""
    keys, values = caches.view(torch.float8_e4m3fn)
    queries = ops.qk_norm_rope_store_kv(qkv, (norm, norm, EPS), rotations, slots, keys, values, slots, scales)
    return [queries, keys, values.float()]


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
        yield _case(
            f"add_experts_rms_norm {tokens}",
            (rows, routed, _normal(tokens, hidden, seed=12, dtype=dtype), _normal(hidden, seed=13, dtype=dtype)),
            lambda ops, rows, routed, residual, weight: [
                ops.add_experts_rms_norm(_outputs(ops, rows, routed, experts), residual, weight, EPS),
                residual,
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
        for scheme in SCHEMES[:1]:
            yield _case(
                f"grouped_gemm {tokens}, {scheme}",
                (Framed(x), gate_up, routed.expert_ids, scheme),
                lambda ops, x, w, ids, scheme: [
                    ops.grouped_gemm(
                        x,
                        ops.pack(quantise(w, scheme, w.dtype)),
                        ops.sort_tokens_by_expert(ids, experts),
                        gather=True,
                        gated=True,
                    )
                ],
            )
        if tokens < 64:
            yield _case(
                f"moe_small_batch {tokens}",
                (x, gate_up, down, routed),
                lambda ops, x, g, d, routed: [ops.moe_small_batch(x, ops.pack(g), ops.pack(d), routed)],
            )


def _outputs(ops: Any, rows: torch.Tensor, routed: RoutedExperts, num_experts: int) -> ExpertOutputs:
    return ExpertOutputs(rows, ops.sort_tokens_by_expert(routed.expert_ids, num_experts), routed.weights)


def _capped(ops: Any, logits: torch.Tensor) -> Results:
    ops.cap_logits(logits, 30.0)
    return [logits]


def _sampling(is_tiny: bool) -> Iterator[OperationCase]:
    rows, vocab = (2, 300) if is_tiny else (64, 151_936)
    logits = 4 * _normal(rows, vocab, seed=11)
    ids = torch.arange(rows)
    pairs = torch.arange(min(1000, vocab)), torch.zeros(min(1000, vocab), dtype=torch.int64)
    top = (torch.full((rows,), 50), torch.full((rows,), 0.9), torch.full((rows,), 0.02))
    ones = torch.ones(rows)
    yield _case("cap_logits", (10 * logits,), _capped)
    drawn = (logits, torch.arange(vocab) % 7 > 0, ids % 2 * ones, ids, ids)
    yield _case("choose_tokens", drawn, lambda ops, *given: [ops.choose_tokens(*given)], peer=cpu)
    yield _case(
        "choose_tokens of truncated rows",
        (*drawn, *top),
        lambda ops, *given: [ops.choose_tokens(*given[:5], Truncation(*given[5:]))],
        peer=cpu,
    )
    yield _case(
        "apply_penalties",
        (logits, pairs[1], pairs[0], pairs[1].int() + 1, 1.2 * ones, 0.5 * ones, 0.25 * ones),
        lambda ops, x, *given: [x, ops.apply_penalties(x, *given)][:1],
        peer=cpu,
    )
