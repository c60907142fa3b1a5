"""The operations of a forward pass, one token, head and expert at a time: products, norms, attention, experts."""

from __future__ import annotations

import math

import torch

from kernels.operands import AttentionRows, ExpertLayout, ExpertOutputs, PackedWeight, ProjectedHeads, RoutedExperts
from kernels.quantised import LARGEST_FLOAT8, PackedQuantised, QuantisedWeight


def pack(weight: torch.Tensor | QuantisedWeight, *, keep_dtype: bool = False) -> PackedWeight:
    """See `Operations.pack`. The weight itself, whose dtype is kept either way."""
    if isinstance(weight, QuantisedWeight):
        return PackedQuantised.as_loaded(weight)
    return PackedWeight.unchanged(weight)


def linear(x: torch.Tensor, weight: PackedWeight, *, gated: bool = False) -> torch.Tensor:
    """`x @ weight.T`, or its `silu_and_mul`."""
    out = multiply(x, weight)
    return silu_and_mul(out) if gated else out


def multiply(x: torch.Tensor, weight: PackedWeight, expert: int | None = None) -> torch.Tensor:
    """x [T, K] times a packed weight [N, K], or the matrix of an expert of [E, N, K]."""
    if isinstance(weight, PackedQuantised):
        return quantised_product(x, weight.weight if expert is None else weight.weight.matrices[expert])
    return product(x, weight.tensor if expert is None else weight.tensor[expert])


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K], weight [N, K] -> [T, N]."""
    return (x.float() @ weight.float().T).to(x.dtype)


def quantised_product(x: torch.Tensor, weight: QuantisedWeight) -> torch.Tensor:
    """x [T, K] times a matrix [N, K] -> [T, N] in the dtype of x, rounded once.

    Integers of activations are those of the scheme; float8 ones are left in their dtype, as every CPU does.
    """
    wide = x.float()
    if weight.input_order is not None:
        wide = wide[:, weight.input_order]
    if weight.scheme.activations == "int8_token":
        wide = torch.stack([_rounded_row(row) for row in wide]) if len(wide) else wide
    return (wide @ dequantised(weight).T).to(x.dtype)


def _rounded_row(row: torch.Tensor) -> torch.Tensor:
    """A row [K] after rounding to 8 bits; a row of next to nothing is zeros."""
    largest = row.abs().max().clamp(min=1e-36)
    return (row * (127 / largest)).round() * (largest / 127)


def dequantised(weight: QuantisedWeight) -> torch.Tensor:
    """A matrix [N, K] in float32, its inputs in the order of `weight.values`."""
    scheme, (num_rows, width) = weight.scheme, weight.shape
    rows = torch.arange(num_rows) // (scheme.block_rows or num_rows)
    groups = torch.arange(width) // (scheme.group_size or width)
    values = weight.values.float()
    if scheme.bits == 4:
        byte = weight.values.long()
        values = torch.stack((byte % 16, byte // 16), dim=2).view(num_rows, width).float()
    zeros: torch.Tensor | float = 8.0 if scheme.bits == 4 else 0.0
    if weight.zero_points is not None:
        zeros = weight.zero_points.float()[rows][:, groups]
    return (values - zeros) * weight.scales.float()[rows][:, groups]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise in float32, round to the model dtype, multiply by the weight, round again."""
    wide = x.float()
    mean_square = (wide * wide).mean(dim=-1, keepdim=True)
    normalised = (wide * torch.rsqrt(mean_square + eps)).to(x.dtype)
    return (normalised.float() * weight.float()).to(x.dtype)


def fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`residual += x` in place, then `rms_norm(residual)`."""
    residual.copy_((residual.float() + x.float()).to(residual.dtype))
    return rms_norm(residual, weight, eps)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, all in float32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) * up` by the tanh form, all in float32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return (0.5 * gate * (1 + torch.tanh(inner)) * up).to(gate_up.dtype)


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """All in float32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate / (1 + torch.exp(-alpha * gate)) * (up + 1)).to(gate_up.dtype)


def cap_logits(logits: torch.Tensor, cap: float) -> None:
    """In place, rounded once."""
    logits.copy_(cap * torch.tanh(logits.float() / cap))


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
    """See `Operations.qk_norm_rope_store_kv`. One token, one head at a time."""
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    num_tokens = qkv.shape[0]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    queries = qkv.new_empty(num_tokens, num_heads, head_dim)
    for token in range(num_tokens):
        heads = qkv[token].view(-1, head_dim)
        rotation = cos_sin[positions[token]]
        for head in range(num_heads):
            query = heads[head] if qk_norm is None else rms_norm(heads[head], qk_norm[0], qk_norm[2])
            queries[token, head] = _rotate(query, rotation)
        slot = int(slot_mapping[token])
        if slot < 0:
            continue
        block, offset = divmod(slot, block_size)
        for kv_head in range(num_kv_heads):
            key = heads[num_heads + kv_head]
            key = key if qk_norm is None else rms_norm(key, qk_norm[1], qk_norm[2])
            key, value = _rotate(key, rotation), heads[num_heads + num_kv_heads + kv_head]
            if kv_scales is not None:
                key, value = as_float8(key, kv_scales[0, kv_head]), as_float8(value, kv_scales[1, kv_head])
            k_cache[block, offset, kv_head] = key
            v_cache[block, offset, kv_head] = value
    return queries


def as_float8(head: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """head / scale in e4m3: half to even, at most 448 in magnitude, NaN where the head is not finite."""
    steps = (head.float() / scale).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8)
    return torch.where(head.isfinite(), steps, torch.nan).to(torch.float8_e4m3fn)


def _rotate(head: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Turn each pair (i, i + D/2) by its angle. head [D]; rotation [D] float32, cosines then sines."""
    first, second = head.float().chunk(2)
    cos, sin = rotation.chunk(2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin)).to(head.dtype)


def paged_decode_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, rows: AttentionRows, scale: float
) -> torch.Tensor:
    """See `Operations.paged_decode_attention`: the prefill of chunks of one query."""
    return paged_prefill_attention(q, k_cache, v_cache, rows, scale)


def paged_prefill_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, rows: AttentionRows, scale: float
) -> torch.Tensor:
    """See `Operations.paged_prefill_attention`. One row, head and query at a time; prefix groups are ignored."""
    num_heads = q.shape[1]
    group_size = num_heads // k_cache.shape[2]
    output = torch.zeros_like(q)
    for row in range(rows.num_rows):
        start, end = int(rows.cu_seqlens_q[row]), int(rows.cu_seqlens_q[row + 1])
        kv_len = int(rows.seq_lens[row])
        keys = _cached_tokens(k_cache, rows.block_tables[row], kv_len)
        values = _cached_tokens(v_cache, rows.block_tables[row], kv_len)
        if rows.kv_scales is not None:
            keys, values = keys * rows.kv_scales[0, :, None], values * rows.kv_scales[1, :, None]
        for query in range(start, end):
            num_seen = kv_len - (end - 1 - query)
            for head in range(num_heads if num_seen > 0 else 0):
                first = 0 if rows.window is None else max(num_seen - rows.window, 0)
                seen_keys = keys[first:num_seen, head // group_size]
                scores = seen_keys @ q[query, head].float() * scale
                if rows.soft_cap is not None:
                    scores = rows.soft_cap * torch.tanh(scores / rows.soft_cap)
                if rows.sinks is not None:
                    scores = torch.cat((scores, rows.sinks[head : head + 1].float()))
                probabilities = torch.softmax(scores, dim=0)[: num_seen - first]
                output[query, head] = probabilities @ values[first:num_seen, head // group_size]
    return output


def _cached_tokens(cache: torch.Tensor, block_table: torch.Tensor, kv_len: int) -> torch.Tensor:
    """The first kv_len tokens of a row, [kv_len, Hkv, D] float32."""
    block_size = cache.shape[1]
    tokens = [cache[int(block_table[i // block_size]), i % block_size] for i in range(kv_len)]
    return torch.stack(tokens).float() if tokens else cache.new_empty(0, *cache.shape[2:]).float()


def route_topk(router_logits: torch.Tensor, top_k: int, *, renormalise: bool) -> RoutedExperts:
    """See `Operations.route_topk`. One token at a time, one choice after the other."""
    num_tokens = router_logits.shape[0]
    weights = torch.empty(num_tokens, top_k)
    expert_ids = torch.empty(num_tokens, top_k, dtype=torch.int64)
    for token in range(num_tokens):
        probabilities = torch.softmax(router_logits[token].float(), dim=0)
        if any(math.isnan(value) for value in probabilities.tolist()):
            weights[token] = math.nan
            expert_ids[token] = torch.arange(top_k)
            continue
        ranked = sorted(range(len(probabilities)), key=lambda expert: (-float(probabilities[expert]), expert))
        expert_ids[token] = torch.tensor(ranked[:top_k])
        weights[token] = probabilities[expert_ids[token]]
        if renormalise:
            weights[token] /= weights[token].sum()
    return RoutedExperts(weights, expert_ids)


def sort_tokens_by_expert(expert_ids: torch.Tensor, num_experts: int) -> ExpertLayout:
    """See `Operations.sort_tokens_by_expert`. Expert after expert, the pairs in order."""
    flat = expert_ids.flatten().tolist()
    pair_ids: list[int] = []
    offsets = [0]
    for expert in range(num_experts):
        pair_ids += [pair for pair, chosen in enumerate(flat) if chosen == expert]
        offsets.append(len(pair_ids))
    if len(pair_ids) != len(flat):
        raise ValueError(f"expert_ids outside 0 to {num_experts - 1}")
    return ExpertLayout(
        torch.tensor(pair_ids, dtype=torch.int64), torch.tensor(offsets, dtype=torch.int64), expert_ids.shape[1]
    )


def grouped_gemm(
    x: torch.Tensor, weight: PackedWeight, layout: ExpertLayout, *, gather: bool, gated: bool = False
) -> torch.Tensor:
    """See `Operations.grouped_gemm`. One expert at a time."""
    out = x.new_empty(layout.pair_ids.shape[0], weight.shape[1])
    sources = layout.pair_ids // layout.top_k if gather else torch.arange(len(out))
    for expert in range(weight.shape[0]):
        rows = slice(int(layout.expert_offsets[expert]), int(layout.expert_offsets[expert + 1]))
        out[rows] = multiply(x[sources[rows]], weight, expert)
    return silu_and_mul(out) if gated else out


def moe_small_batch(x: torch.Tensor, gate_up: PackedWeight, down: PackedWeight, routed: RoutedExperts) -> torch.Tensor:
    """See `Operations.moe_small_batch`."""
    out = torch.zeros(x.shape[0], down.shape[1])
    for token in range(x.shape[0]):
        for weight, expert in zip(routed.weights[token], routed.expert_ids[token].tolist(), strict=True):
            hidden = silu_and_mul(multiply(x[token : token + 1], gate_up, expert))
            out[token] += weight * multiply(hidden, down, expert)[0].float()
    return out.to(x.dtype)


def combine_experts(rows: torch.Tensor, layout: ExpertLayout, weights: torch.Tensor) -> torch.Tensor:
    """See `Operations.combine_experts`."""
    num_tokens, top_k = weights.shape
    out = torch.zeros(num_tokens, rows.shape[1])
    for row, pair in enumerate(layout.pair_ids.tolist()):
        token, choice = divmod(pair, top_k)
        out[token] += weights[token, choice] * rows[row].float()
    return out.to(rows.dtype)


def add_experts_rms_norm(
    outputs: ExpertOutputs, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """See `Operations.add_experts_rms_norm`."""
    return fused_add_rms_norm(combine_experts(*outputs), residual, weight, eps)


def route_and_sort(router_logits: torch.Tensor, top_k: int, *, renormalise: bool) -> tuple[torch.Tensor, ExpertLayout]:
    """See `Operations.route_and_sort`."""
    routed = route_topk(router_logits, top_k, renormalise=renormalise)
    return routed.weights, sort_tokens_by_expert(routed.expert_ids, router_logits.shape[1])


def store_and_decode(heads: ProjectedHeads, rows: AttentionRows, scale: float) -> torch.Tensor:
    """See `Operations.store_and_decode`."""
    queries = qk_norm_rope_store_kv(*heads)
    return paged_decode_attention(queries, heads.k_cache, heads.v_cache, rows, scale)
