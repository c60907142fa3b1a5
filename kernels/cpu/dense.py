"""The dense operations of a layer: products with a weight, RMSNorm, the gated activation, rotary and cache write."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (the customary name)

from kernels.operands import PackedWeight, refuse_float8

# A float16 weight is converted this many elements at a time: 8 MiB of float32, which stay in cache.
FLOAT16_CHUNK_ELEMENTS = 1 << 21
# oneDNN's hint when it lays a weight out: of 1, 16, 64, 256, 512 and 1024 the best, or within noise of it, for 1 to
# 2048 rows.
ROWS_HINT = 64


def pack(weight: torch.Tensor, *, keep_dtype: bool = False) -> PackedWeight:
    """See `Operations.pack`. One part per matrix, in oneDNN's blocked layout where it has one; float32 experts stay as
    they are. The dtype is kept.
    """
    if weight.dim() == 3 and weight.dtype is torch.float32:
        return PackedWeight.unchanged(weight)  # see `plain_gemm`
    matrices = weight.unbind() if weight.dim() == 3 else (weight,)
    if _has_blocked_layout(weight.dtype):
        matrices = tuple(torch.ops.mkldnn._reorder_linear_weight(matrix, ROWS_HINT) for matrix in matrices)
    return PackedWeight(tuple(matrices), tuple(weight.shape))


def linear(x: torch.Tensor, weight: PackedWeight, *, gated: bool = False) -> torch.Tensor:
    """See `Operations.linear`."""
    out = product(x, weight.parts[0])
    return silu_and_mul(out) if gated else out


def product(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """x [T, K], matrix: a part of what `pack` made of a weight [.., N, K] -> [T, N]."""
    if matrix.is_mkldnn:
        # The overload is named because looking it up takes 8 us each time.
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, matrix, None, "none", [], "")
        return result
    return product_into(x, matrix, x.new_empty(x.shape[0], matrix.shape[0]))


def product_into(x: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`product` with a plain matrix [N, K], written to out [T, N] and returned."""
    if x.dtype is not torch.float16:
        return torch.mm(x, matrix.t(), out=out)
    wide = x.float()
    rows = max(FLOAT16_CHUNK_ELEMENTS // matrix.shape[1], 1)
    for start in range(0, matrix.shape[0], rows):
        out[:, start : start + rows] = wide @ matrix[start : start + rows].float().t()
    return out


def _has_blocked_layout(dtype: torch.dtype) -> bool:
    """Whether weights of `dtype` get a copy in oneDNN's layout: on x86, where it was measured, float32, and bfloat16
    where oneDNN computes in it.
    """
    if not torch._C._has_mkldnn or "AVX" not in torch.backends.cpu.get_cpu_capability():
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, rounded where transformers rounds: once before the weight, once after."""
    wide = x.float()
    inverse_rms = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return torch.mul(wide, inverse_rms).to(x.dtype).mul_(weight)


def fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`residual += x` in place, rounded to the model dtype, then `rms_norm(residual)`."""
    residual.add_(x)
    return rms_norm(residual, weight, eps)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of gate_up [T, 2I] -> [T, I]; silu is rounded to the model dtype first, as in transformers."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `Operations.gelu_and_mul`; gelu is rounded to the model dtype first, as in transformers."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """See `Operations.clamped_swiglu`. In float32, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    activated = torch.sigmoid(gate * alpha).mul_(gate).mul_(up.clamp(-limit, limit).add_(1))
    return activated.to(gate_up.dtype)


def cap_logits(logits: torch.Tensor, cap: float) -> None:
    """See `Operations.cap_logits`."""
    wide = logits.float()  # itself in float32
    wide.div_(cap).tanh_().mul_(cap)
    logits.copy_(wide)


def qk_norm_rope_store_kv(
    qkv: torch.Tensor,
    qk_norm: tuple[torch.Tensor, torch.Tensor, float] | None,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `Operations.qk_norm_rope_store_kv`.

    In float32 the result is transformers' bit for bit. In bfloat16 and float16 the rotation is computed in float32 and
    rounded once, where transformers rounds the cosine, the sine and both products. Raises ValueError for float8.
    """
    refuse_float8(k_cache, v_cache, kv_scales)
    num_kv_heads, head_dim = k_cache.shape[-2:]
    num_tokens = qkv.shape[0]
    heads = qkv.view(num_tokens, -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    queries, keys, values = torch.tensor_split(heads, (num_heads, num_heads + num_kv_heads), dim=1)
    if qk_norm is not None:
        query_weight, key_weight, eps = qk_norm
        queries = rms_norm(queries, query_weight, eps)
        keys = rms_norm(keys, key_weight, eps)
    cos, sin = cos_sin.index_select(0, positions)[:, None, :].chunk(2, dim=-1)
    _store(_rotate(keys, cos, sin), k_cache, slot_mapping)
    _store(values, v_cache, slot_mapping)
    return _rotate(queries, cos, sin)


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.float().chunk(2, dim=-1)
    rotated = torch.empty_like(heads, memory_format=torch.contiguous_format)
    half = first.shape[-1]
    rotated[..., :half] = (first * cos).sub_(second * sin)
    rotated[..., half:] = (second * cos).add_(first * sin)
    return rotated


def _store(heads: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    slots = cache.view(-1, *cache.shape[2:])
    written = slot_mapping >= 0
    if not written.all():
        kept = written.nonzero().flatten()
        heads, slot_mapping = heads.index_select(0, kept), slot_mapping.index_select(0, kept)
    slots.index_copy_(0, slot_mapping, heads)
