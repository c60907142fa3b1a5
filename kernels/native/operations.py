"""`kernels.interface.Operations` by one variant of the native kernels, with what it leaves to `kernels.cpu`."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import byref
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch

from kernels import cpu
from kernels.native.attention import is_attended, paged_attention
from kernels.native.library import (
    CombineArgs,
    Kernels,
    NormArgs,
    RopeArgs,
    RouteArgs,
    SiluArgs,
    gemm_args,
    load,
    pointer,
    round_up,
)
from kernels.native.quantised import NativeQuantised, is_multiplied, multiply, pack_quantised
from kernels.native.sampling import choose
from kernels.operands import (
    AttentionRows,
    ExpertLayout,
    ExpertOutputs,
    PackedWeight,
    ProjectedHeads,
    RoutedExperts,
    Truncation,
    in_huge_pages,
    refuse_float8,
)
from kernels.quantised import QuantisedWeight

Tensor = torch.Tensor
TILE = 32  # a packed weight's rows and columns are filled up to multiples of it
STRIP = 16  # rows of a weight that lie side by side, which are columns of a product
GATED_STEP = STRIP
ROWS_STEP = 32  # with AMX, the same of rows that oneDNN multiplies
DTYPES = (torch.float32, torch.bfloat16)  # float16 is left to kernels.cpu: the engine refuses it on a CPU


@dataclass(frozen=True, eq=False)
class NativePacked(PackedWeight):
    """A bfloat16 weight as `pack_weight` of src/gemm.h lays it out: one part, [E, elements] for experts."""

    has_rows: ClassVar[bool] = True

    def rows(self, indices: Tensor) -> Tensor:
        """See `PackedWeight.rows`: 16 rows lie side by side, a pair of elements at a time."""
        width = self.shape[1]
        pairs = self.tensor.view(torch.int32).view(-1, round_up(width, TILE) // 2, STRIP)
        found = pairs[indices // STRIP, :, indices % STRIP]
        return found.view(torch.bfloat16)[:, :width].contiguous()


class NativeOperations:
    """The operations on a CPU. An operation that a variant does not do, or not in a dtype, is `kernels.cpu`'s."""

    # Operation -> the library that does its larger part: PyTorch's products are faster where a CPU has no instructions
    # for bfloat16.
    library_calls: Mapping[str, str] = MappingProxyType({"linear": "oneDNN through PyTorch; the gate: native"})

    def __init__(self, variant: str) -> None:
        """variant: see `kernels.native.library`. Raises KernelsUnavailable."""
        self.variant = variant
        self._kernels: Kernels = load(variant)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Operations.rms_norm`."""
        if x.dtype not in DTYPES:
            return cpu.rms_norm(x, weight, eps)
        rows = _rows(x.reshape(-1, x.shape[-1]))
        out = x.new_empty(x.shape)
        self._norm(rows, None, weight, eps, out)
        return out

    def fused_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Operations.fused_add_rms_norm`."""
        if x.dtype not in DTYPES or residual.stride(1) != 1:
            return cpu.fused_add_rms_norm(x, residual, weight, eps)
        out = x.new_empty(x.shape)
        self._norm(_rows(x), residual, weight, eps, out)
        return out

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
        args = NormArgs(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            residual=pointer(residual),
            residual_stride=0 if residual is None else residual.stride(0),
            weight=weight.data_ptr(),
            eps=eps,
            rows=x.shape[0],
            width=x.shape[1],
            out=out.data_ptr(),
            is_float=x.dtype is torch.float32,
        )
        self._kernels.norm(byref(args))

    def pack(self, weight: Tensor | QuantisedWeight, *, keep_dtype: bool = False) -> PackedWeight:
        """See `Operations.pack`. A quantised weight in strips, another as `kernels.cpu` does."""
        if isinstance(weight, QuantisedWeight) and is_multiplied(self._kernels, weight):
            return pack_quantised(self._kernels, weight)
        return cpu.pack(weight, keep_dtype=keep_dtype)

    def linear(self, x: Tensor, weight: PackedWeight, *, gated: bool = False) -> Tensor:
        """See `Operations.linear`. The product is PyTorch's unless the weight is quantised."""
        if isinstance(weight, NativeQuantised):
            return self._quantised(x, weight, None, gather=False, gated=gated)
        out = cpu.linear(x, weight)
        return self.silu_and_mul(out) if gated else out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `Operations.silu_and_mul`."""
        if gate_up.dtype not in DTYPES:
            return cpu.silu_and_mul(gate_up)
        rows = _rows(gate_up)
        out = gate_up.new_empty(rows.shape[0], rows.shape[1] // 2)
        args = SiluArgs(
            gate_up=rows.data_ptr(),
            stride=rows.stride(0),
            rows=rows.shape[0],
            width=out.shape[1],
            out=out.data_ptr(),
            is_float=rows.dtype is torch.float32,
        )
        self._kernels.silu_and_mul(byref(args))
        return out

    def qk_norm_rope_store_kv(
        self,
        qkv: Tensor,
        qk_norm: tuple[Tensor, Tensor, float] | None,
        cos_sin: Tensor,
        positions: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        """See `Operations.qk_norm_rope_store_kv`. Raises ValueError for float8."""
        refuse_float8(k_cache, v_cache, kv_scales)
        if qkv.dtype not in DTYPES or not (k_cache.is_contiguous() and v_cache.is_contiguous()):
            return cpu.qk_norm_rope_store_kv(qkv, qk_norm, cos_sin, positions, k_cache, v_cache, slot_mapping)
        rows = _rows(qkv)
        num_kv_heads, head_dim = k_cache.shape[2:]
        num_heads = rows.shape[1] // head_dim - 2 * num_kv_heads
        queries = qkv.new_empty(rows.shape[0], num_heads, head_dim)
        q_weight, k_weight, eps = qk_norm or (None, None, 0.0)
        args = RopeArgs(
            qkv=rows.data_ptr(),
            qkv_stride=rows.stride(0),
            tokens=rows.shape[0],
            heads=num_heads,
            kv_heads=num_kv_heads,
            dim=head_dim,
            q_weight=pointer(q_weight),
            k_weight=pointer(k_weight),
            eps=eps,
            cos_sin=cos_sin.data_ptr(),
            positions=positions.data_ptr(),
            slots=slot_mapping.data_ptr(),
            k_cache=k_cache.data_ptr(),
            v_cache=v_cache.data_ptr(),
            q_out=queries.data_ptr(),
            is_float=rows.dtype is torch.float32,
        )
        self._kernels.rope(byref(args))
        return queries

    def route_topk(self, router_logits: Tensor, top_k: int, *, renormalise: bool) -> RoutedExperts:
        """See `Operations.route_topk`."""
        if router_logits.dtype not in DTYPES:
            return cpu.route_topk(router_logits, top_k, renormalise=renormalise)
        return self._route(_rows(router_logits), top_k, None, renormalise=renormalise)

    def _route(self, rows: Tensor, top_k: int, layout: ExpertLayout | None, *, renormalise: bool) -> RoutedExperts:
        """layout: is filled."""
        weights = torch.empty(rows.shape[0], top_k)
        expert_ids = torch.empty(rows.shape[0], top_k, dtype=torch.int64)
        args = RouteArgs(
            logits=rows.data_ptr(),
            stride=rows.stride(0),
            tokens=rows.shape[0],
            experts=rows.shape[1],
            choices=top_k,
            renormalise=renormalise,
            weights=weights.data_ptr(),
            ids=expert_ids.data_ptr(),
            is_float=rows.dtype is torch.float32,
        )
        if layout is not None:
            args.pairs, args.offsets = layout.pair_ids.data_ptr(), layout.expert_offsets.data_ptr()
            args.places = pointer(layout.places)
        self._kernels.route(byref(args))
        return RoutedExperts(weights, expert_ids)

    def store_and_decode(self, heads: ProjectedHeads, rows: AttentionRows, scale: float) -> Tensor:
        """See `Operations.store_and_decode`."""
        queries = self.qk_norm_rope_store_kv(*heads)
        return self.paged_decode_attention(queries, heads.k_cache, heads.v_cache, rows, scale)

    def add_experts_rms_norm(self, outputs: ExpertOutputs, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Operations.add_experts_rms_norm`."""
        return self.fused_add_rms_norm(self.combine_experts(*outputs), residual, weight, eps)

    def combine_experts(self, rows: Tensor, layout: ExpertLayout, weights: Tensor) -> Tensor:
        """See `Operations.combine_experts`. A token's choices are added in their order, whatever the layout.

        float32 is left to PyTorch's embedding bag: 0.47 ms instead of 0.81 for 2,048 tokens with 4 rows of 512.
        """
        if rows.dtype is not torch.bfloat16:
            return cpu.combine_experts(rows, layout, weights)
        rows = _rows(rows)
        places = layout.places
        if places is None:
            places = torch.empty_like(layout.pair_ids, dtype=torch.int32)
            places[layout.pair_ids] = torch.arange(places.shape[0], dtype=torch.int32)
        weights = weights.contiguous()
        out = rows.new_empty(weights.shape[0], rows.shape[1])
        args = CombineArgs(
            values=rows.data_ptr(),
            stride=rows.stride(0),
            places=places.data_ptr(),
            weights=weights.data_ptr(),
            tokens=weights.shape[0],
            choices=weights.shape[1],
            width=rows.shape[1],
            out=out.data_ptr(),
            is_float=rows.dtype is torch.float32,
        )
        self._kernels.combine(byref(args))
        return out

    def choose_tokens(
        self,
        logits: Tensor,
        is_known: Tensor,
        temperatures: Tensor,
        seeds: Tensor,
        positions: Tensor,
        truncation: Truncation | None = None,
    ) -> Tensor:
        """See `Operations.choose_tokens`."""
        if logits.dtype not in DTYPES:
            return cpu.choose_tokens(logits, is_known, temperatures, seeds, positions, truncation)
        return choose(self._kernels, logits, is_known, (temperatures, seeds, positions), truncation)

    def route_and_sort(self, router_logits: Tensor, top_k: int, *, renormalise: bool) -> tuple[Tensor, ExpertLayout]:
        """See `Operations.route_and_sort`."""
        if router_logits.dtype not in DTYPES:
            return cpu.route_and_sort(router_logits, top_k, renormalise=renormalise)
        rows = _rows(router_logits)
        offsets = torch.empty(rows.shape[1] + 1, dtype=torch.int64)
        pairs = torch.empty(rows.shape[0] * top_k, dtype=torch.int64)
        layout = ExpertLayout(pairs, offsets, top_k, torch.empty_like(pairs, dtype=torch.int32))
        return self._route(rows, top_k, layout, renormalise=renormalise).weights, layout

    def grouped_gemm(
        self, x: Tensor, weight: PackedWeight, layout: ExpertLayout, *, gather: bool, gated: bool = False
    ) -> Tensor:
        """See `Operations.grouped_gemm`. PyTorch's unless the weight is quantised."""
        if isinstance(weight, NativeQuantised):
            return self._quantised(x, weight, layout, gather=gather, gated=gated)
        return cpu.grouped_gemm(x, weight, layout, gather=gather, gated=gated)

    def moe_small_batch(self, x: Tensor, gate_up: PackedWeight, down: PackedWeight, routed: RoutedExperts) -> Tensor:
        """See `Operations.moe_small_batch`. Native products are sorted all the same: they read rows where they lie."""
        native = (NativeQuantised, NativePacked)
        if not isinstance(gate_up, native) and not isinstance(down, native):
            return cpu.moe_small_batch(x, gate_up, down, routed)
        layout = self.sort_tokens_by_expert(routed.expert_ids, gate_up.shape[0])
        hidden = self.grouped_gemm(x, gate_up, layout, gather=True, gated=True)
        return self.combine_experts(self.grouped_gemm(hidden, down, layout, gather=False), layout, routed.weights)

    def _quantised(
        self, x: Tensor, weight: NativeQuantised, layout: ExpertLayout | None, *, gather: bool, gated: bool
    ) -> Tensor:
        # The gate's columns must end where a strip does, so that those of the up projection begin with one.
        fused = gated and weight.shape[-2] % (2 * GATED_STEP) == 0
        rows = multiply(self._kernels, x, weight, layout, gather=gather, gated=fused)
        return self.silu_and_mul(rows) if gated and not fused else rows

    # By PyTorch, and so named by `implementation_names`; subclasses below have native ones of some.
    gelu_and_mul = staticmethod(cpu.gelu_and_mul)
    clamped_swiglu = staticmethod(cpu.clamped_swiglu)
    cap_logits = staticmethod(cpu.cap_logits)
    sort_tokens_by_expert = staticmethod(cpu.sort_tokens_by_expert)
    paged_decode_attention = staticmethod(cpu.paged_decode_attention)
    paged_prefill_attention = staticmethod(cpu.paged_prefill_attention)
    apply_penalties = staticmethod(cpu.apply_penalties)


class Avx512Operations(NativeOperations):
    """The operations on a CPU with AVX-512: attention is native too.

    With AVX2 it takes 0.9 to 1.9 times PyTorch's time in float32, and 1.0 to 5 times in bfloat16.
    """

    def paged_decode_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: AttentionRows, scale: float
    ) -> Tensor:
        """See `Operations.paged_decode_attention`. Raises ValueError if there are not as many queries as rows."""
        if not is_attended(q, k_cache, v_cache):
            return cpu.paged_decode_attention(q, k_cache, v_cache, rows, scale)
        if q.shape[0] != rows.num_rows:
            raise ValueError(f"q has {q.shape[0]} queries for {rows.num_rows} rows; a decode row has exactly one")
        return paged_attention(self._kernels, q, k_cache, v_cache, rows, scale)

    def paged_prefill_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: AttentionRows, scale: float
    ) -> Tensor:
        """See `Operations.paged_prefill_attention`."""
        if not is_attended(q, k_cache, v_cache):
            return cpu.paged_prefill_attention(q, k_cache, v_cache, rows, scale)
        return paged_attention(self._kernels, q, k_cache, v_cache, rows, scale)


class Bfloat16Operations(Avx512Operations):
    """The operations on a CPU that multiplies bfloat16 in hardware: products of that dtype are native too.

    A product takes as long as oneDNN's from 64 rows on and less below, and a layer's experts are one call instead of 64
    (kernels/DESIGN.md has the figures).
    """

    library_calls: Mapping[str, str] = MappingProxyType({})

    def pack(self, weight: Tensor | QuantisedWeight, *, keep_dtype: bool = False) -> PackedWeight:
        """See `Operations.pack`. bfloat16 in 16 x 16 tiles, padded with zeros; others as `kernels.cpu` does."""
        if isinstance(weight, QuantisedWeight) or weight.dtype is not torch.bfloat16:
            return super().pack(weight, keep_dtype=keep_dtype)
        return self._pack(weight)

    def _pack(self, weight: Tensor) -> PackedWeight:
        num_rows, depth = weight.shape[-2:]
        matrices = weight.contiguous().view(-1, num_rows, depth)
        size = round_up(num_rows, TILE) * round_up(depth, TILE)
        packed = in_huge_pages(weight.itemsize * matrices.shape[0] * size).view(weight.dtype).view(-1, size)
        for matrix, out in zip(matrices, packed, strict=True):
            self._kernels.pack_weight(matrix.data_ptr(), num_rows, depth, out.data_ptr())
        return NativePacked((packed,), tuple(weight.shape))

    def linear(self, x: Tensor, weight: PackedWeight, *, gated: bool = False) -> Tensor:
        """See `Operations.linear`. The gate is applied within the product."""
        if not isinstance(weight, NativePacked):
            return super().linear(x, weight, gated=gated)
        return self._gemm(x, weight, x.shape[0], gated=gated)

    def grouped_gemm(
        self, x: Tensor, weight: PackedWeight, layout: ExpertLayout, *, gather: bool, gated: bool = False
    ) -> Tensor:
        """See `Operations.grouped_gemm`. Rows are gathered, and the gate applied, within the product."""
        if not isinstance(weight, NativePacked):
            return super().grouped_gemm(x, weight, layout, gather=gather, gated=gated)
        num_pairs = layout.pair_ids.shape[0]
        expected = num_pairs // layout.top_k if gather else num_pairs
        if x.shape[0] != expected:
            raise ValueError(f"x has {x.shape[0]} rows; accepted: {expected}, as the layout has")
        return self._gemm(x, weight, num_pairs, layout=layout, gather=gather, gated=gated)

    def _gemm(
        self,
        x: Tensor,
        weight: NativePacked,
        num_rows: int,
        *,
        layout: ExpertLayout | None = None,
        gather: bool = False,
        gated: bool,
    ) -> Tensor:
        """x times a packed matrix or, with a layout, each expert's rows times the expert's matrix.

        [num_rows, N] or, gated, [num_rows, N / 2].
        """
        width, depth = weight.shape[-2:]
        if x.shape[1] != depth:
            raise ValueError(f"x has {x.shape[1]} columns; accepted: {depth}, as the weight has")
        # The gate's columns must end where a tile does, so that those of the up projection begin with one.
        fused = gated and width % (2 * GATED_STEP) == 0
        out = x.new_empty(num_rows, width // 2 if fused else width)
        args = gemm_args(_rows(x), weight.tensor, weight.shape, out, layout, gather=gather)
        self._kernels.gemm(byref(args))
        return self.silu_and_mul(out) if gated and not fused else out


class AmxOperations(Bfloat16Operations):
    """The operations on a CPU with AMX: experts are native, dense products oneDNN's.

    oneDNN runs 2,048 rows at 2.1 to 2.8 TFLOP/s, these kernels at 1.8 to 2.1; at 64 rows both read weights at 16 to 21
    GB/s. But it makes a primitive, 1 to 2 ms, for each new number of rows: rows are filled up to multiples of 32.
    """

    library_calls = NativeOperations.library_calls

    def pack(self, weight: Tensor | QuantisedWeight, *, keep_dtype: bool = False) -> PackedWeight:
        """See `Operations.pack`. Experts in bfloat16 in tiles, the rest as `kernels.cpu` does."""
        if isinstance(weight, QuantisedWeight) or weight.dim() == 3:
            return super().pack(weight, keep_dtype=keep_dtype)
        return cpu.pack(weight, keep_dtype=keep_dtype)

    def linear(self, x: Tensor, weight: PackedWeight, *, gated: bool = False) -> Tensor:
        """See `Operations.linear`."""
        if isinstance(weight, NativeQuantised):
            return super().linear(x, weight, gated=gated)
        num_rows = x.shape[0]
        if x.dtype is torch.bfloat16 and num_rows % ROWS_STEP:
            filled = x.new_zeros(round_up(num_rows, ROWS_STEP), x.shape[1])
            filled[:num_rows] = x
            x = filled
        out = cpu.linear(x, weight)[:num_rows]
        return self.silu_and_mul(out) if gated else out


def native_operations(variant: str) -> NativeOperations:
    """The operations by that variant of the kernels. Raises KernelsUnavailable where this machine cannot run it."""
    if variant.startswith("amx"):
        return AmxOperations(variant)
    by_variant = {"avx512_bf16": Bfloat16Operations, "avx512": Avx512Operations}
    return by_variant.get(variant, NativeOperations)(variant)


def _rows(x: Tensor) -> Tensor:
    """x [n, m], copied unless each row's elements lie side by side."""
    return x if x.stride(1) == 1 else x.contiguous()
