"""`kernels.interface.Operations` by one variant of the native kernels, with what it leaves to `kernels.cpu`."""

from __future__ import annotations

from ctypes import byref

import torch

from kernels import cpu
from kernels.native.library import (
    ArgmaxArgs,
    CombineArgs,
    Kernels,
    NormArgs,
    RopeArgs,
    RouteArgs,
    SiluArgs,
    load,
    pointer,
)
from kernels.operands import ExpertLayout, RoutedExperts

Tensor = torch.Tensor
DTYPES = (torch.float32, torch.bfloat16)  # float16 is left to kernels.cpu: the engine refuses it on a CPU


class NativeOperations:
    """The operations on a CPU. An operation that a variant does not do, or not in a dtype, is `kernels.cpu`'s."""

    def __init__(self, variant: str) -> None:
        """variant: see `kernels.native.library`. Raises KernelsUnavailable."""
        self.variant = variant
        self._kernels: Kernels = load(variant)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Operations.rms_norm`."""
        if x.dtype not in DTYPES:
            return cpu.rms_norm(x, weight, eps)
        rows = _rows(x.reshape(-1, x.shape[-1]))
        out = torch.empty(x.shape, dtype=x.dtype)
        self._norm(rows, None, weight, eps, out)
        return out

    def fused_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Operations.fused_add_rms_norm`."""
        if x.dtype not in DTYPES or residual.stride(1) != 1:
            return cpu.fused_add_rms_norm(x, residual, weight, eps)
        out = torch.empty(x.shape, dtype=x.dtype)
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
    ) -> Tensor:
        """See `Operations.qk_norm_rope_store_kv`."""
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
        rows = _rows(router_logits)
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
        self._kernels.route(byref(args))
        return RoutedExperts(weights, expert_ids)

    def combine_experts(self, rows: Tensor, layout: ExpertLayout, weights: Tensor) -> Tensor:
        """See `Operations.combine_experts`. A token's choices are added in their order, whatever the layout."""
        if rows.dtype not in DTYPES:
            return cpu.combine_experts(rows, layout, weights)
        rows = _rows(rows)
        places = torch.empty_like(layout.pair_ids)
        places.scatter_(0, layout.pair_ids, torch.arange(places.shape[0]))
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

    def argmax(self, logits: Tensor) -> Tensor:
        """See `Operations.argmax`. A NaN counts as the largest, as in `torch.argmax`."""
        rows = _rows(logits)
        ids = torch.empty(rows.shape[0], dtype=torch.int64)
        args = ArgmaxArgs(
            logits=rows.data_ptr(),
            stride=rows.stride(0),
            rows=rows.shape[0],
            width=rows.shape[1],
            ids=ids.data_ptr(),
        )
        self._kernels.argmax(byref(args))
        return ids

    # By PyTorch and oneDNN, whose products of float32 and, without AMX, of bfloat16 are faster.
    pack = staticmethod(cpu.pack)
    linear = staticmethod(cpu.linear)
    sort_tokens_by_expert = staticmethod(cpu.sort_tokens_by_expert)
    grouped_gemm = staticmethod(cpu.grouped_gemm)
    moe_small_batch = staticmethod(cpu.moe_small_batch)
    paged_decode_attention = staticmethod(cpu.paged_decode_attention)
    paged_prefill_attention = staticmethod(cpu.paged_prefill_attention)
    apply_penalties = staticmethod(cpu.apply_penalties)
    mask_top_k_top_p_min_p = staticmethod(cpu.mask_top_k_top_p_min_p)
    gumbel_argmax = staticmethod(cpu.gumbel_argmax)


def _rows(x: Tensor) -> Tensor:
    """x [n, m], copied unless each row's elements lie side by side."""
    return x if x.stride(1) == 1 else x.contiguous()
