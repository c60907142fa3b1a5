"""The operations that every implementation offers, and the error for a device that has none.

`kernels.cpu`, `kernels.deterministic`, `kernels.int8`, `kernels.triton` and `kernels.reference` are modules that
satisfy `Operations`, and mypy checks that they do.

Notation: T tokens of a step, N rows (requests), H hidden size, Hq query heads, Hkv KV heads, D head_dim, I intermediate
size, E experts, K experts per token, V vocabulary. "model dtype" is float32, bfloat16 or float16. Every sum is
accumulated in float32. Nothing is written but what is called an output or "in place".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.operands import (
    AttentionRows,
    ExpertLayout,
    ExpertOutputs,
    PackedWeight,
    ProjectedHeads,
    RoutedExperts,
    Truncation,
)
from kernels.quantised import QuantisedWeight

Tensor = torch.Tensor


class Operations(Protocol):
    """The operations of a forward pass and of sampling.

    Weights, tables, lengths, positions, slots and other indices are contiguous; other tensors may be views.
    """

    def pack(self, weight: Tensor | QuantisedWeight, *, keep_dtype: bool = False) -> PackedWeight:
        """Lay a weight out once for all products with it. The caller drops the original; the packed weight may hold it.

        weight [N, K] for `linear`, [E, N, K] for `grouped_gemm` and `moe_small_batch`, in the model dtype or
        quantised (`kernels.quantised` says what a product with it is; a product may round each of its elements to the
        model dtype once, and keeps them packed in memory);
        keep_dtype: do not quantise it (a router, whose rounding would send tokens to other experts).
        Raises KernelsUnavailable for a quantised weight that the implementation has no products for.
        """

    def linear(self, x: Tensor, weight: PackedWeight, *, gated: bool = False) -> Tensor:
        """`x @ weight.T`. x [T, K] model dtype, weight [N, K] -> [T, N] model dtype.

        gated: `silu_and_mul` of the product is returned, [T, N / 2].
        """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over the last dimension (arXiv 1910.07467): x * rsqrt(mean(x^2) + eps) in float32, cast to the
        model dtype, then times weight. x [..., H], weight [H] -> [..., H]."""

    def fused_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual += x` in place, then `rms_norm(residual)`. x, residual [T, H], weight [H] -> [T, H]."""

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` (SwiGLU, arXiv 2002.05202). gate_up [T, 2I], gate first -> [T, I]."""

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        """`gelu(gate) * up` (GeGLU, arXiv 2002.05202) by GELU's tanh form (arXiv 1606.08415); as `silu_and_mul`."""

    def clamped_swiglu(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        """`gate * sigmoid(alpha * gate) * (up + 1)` of a gate of at most `limit` and an up within it on both sides
        (gpt-oss); as `silu_and_mul`.
        """

    def cap_logits(self, logits: Tensor, cap: float) -> None:
        """In place: each logit x becomes cap * tanh(x / cap). logits [N, V] model dtype, cap above 0."""

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
        """Optional RMSNorm of each query and key head, rotary embedding (arXiv 2104.09864, half-split "neox" form) and
        the write of keys and values into the paged cache.

        qkv [T, (Hq + 2 Hkv) * D] model dtype, queries first, then keys, then values;
        qk_norm (query weight [D], key weight [D], eps) or None;
        cos_sin [max_positions, D] float32: cosines of the D/2 frequencies, then their sines;
        positions [T] int64; k_cache, v_cache [num_blocks, block_size, Hkv, D] model dtype, written in place;
        slot_mapping [T] int64: block_id * block_size + offset, a slot < 0 writes nothing;
        kv_scales [2, Hkv] float32, above 0: of keys, then of values, with caches in float8 e4m3, where elements are
        divided by the scale of their head and rounded half to even, at most 448 in magnitude; those that are not
        finite become NaN. None, and the caches as said, else. The implementations for CPUs refuse float8.
        -> queries [T, Hq, D] model dtype, contiguous.
        """

    def paged_decode_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: AttentionRows, scale: float
    ) -> Tensor:
        """Attention of one query a row over that row's whole sequence, or its last `rows.window` keys; 0 for a row
        without keys.

        q [N, Hq, D]; caches as above, `rows.kv_scales` their scales -> like q, contiguous.

        Both attentions may use `rows.prefix_groups` or ignore them; the result is the same up to rounding. Both cap
        scores and add sinks where `rows` has them.

        Cache entries past a row's length, whatever they hold (NaN included), have no influence.
        """

    def store_and_decode(self, heads: ProjectedHeads, rows: AttentionRows, scale: float) -> Tensor:
        """`qk_norm_rope_store_kv` of one token a row, then `paged_decode_attention` of its queries.

        The token of each row is its last: it lies at position seq_lens[i] - 1, in the slot of that position or, where
        its slot is < 0, nowhere (what such a row gets has no meaning).
        """

    def paged_prefill_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: AttentionRows, scale: float
    ) -> Tensor:
        """Causal attention of ragged chunks: query j of a row with Q queries and S keys sees keys 0 .. S - Q + j, or
        the last `rows.window` of these.

        q [sum of query_lens, Hq, D]; caches as above, the same promise about entries past a row's length -> like q,
        contiguous, 0 for a query without keys.
        """

    def route_topk(self, router_logits: Tensor, top_k: int, *, renormalise: bool) -> RoutedExperts:
        """Softmax over E in float32, the top_k largest (ties to the lower id), divided by their sum when renormalise.

        router_logits [T, E] model dtype. A row with a NaN gets weights of NaN (so that its result shows it) and the
        experts 0 .. K-1.
        """

    def sort_tokens_by_expert(self, expert_ids: Tensor, num_experts: int) -> ExpertLayout:
        """Order the (token, choice) pairs by expert, stable. expert_ids [T, K] int64."""

    def route_and_sort(self, router_logits: Tensor, top_k: int, *, renormalise: bool) -> tuple[Tensor, ExpertLayout]:
        """`route_topk`, whose weights it returns, and `sort_tokens_by_expert` of its experts."""

    def grouped_gemm(
        self, x: Tensor, weight: PackedWeight, layout: ExpertLayout, *, gather: bool, gated: bool = False
    ) -> Tensor:
        """Each expert's rows times its weight. weight [E, N, K] -> [T * top_k, N] model dtype, in the layout's order.

        gather: x is [T, K] and row r of the result uses token `pair_ids[r] // top_k`; otherwise x is
        [T * top_k, K] and already in the layout's order.
        gated: `silu_and_mul` of the products is returned, [T * top_k, N / 2].
        """

    def moe_small_batch(self, x: Tensor, gate_up: PackedWeight, down: PackedWeight, routed: RoutedExperts) -> Tensor:
        """The whole expert layer without sorting, a pair at a time: the short cut for a few tokens.

        x [T, H], gate_up [E, 2I, H], down [E, H, I] -> [T, H] model dtype.
        """

    def combine_experts(self, rows: Tensor, layout: ExpertLayout, weights: Tensor) -> Tensor:
        """Weighted sum of each token's expert outputs, accumulated in float32.

        rows [T * top_k, H] in the layout's order, weights [T, top_k] float32 -> [T, H] model dtype.
        """

    def add_experts_rms_norm(self, outputs: ExpertOutputs, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`fused_add_rms_norm` of `combine_experts`: an expert layer's end and the next one's beginning.

        residual [T, H], written in place; weight [H] -> [T, H].
        """

    def apply_penalties(
        self,
        logits: Tensor,
        rows: Tensor,
        token_ids: Tensor,
        output_counts: Tensor,
        repetition: Tensor,
        presence: Tensor,
        frequency: Tensor,
    ) -> None:
        """In place: repetition penalty over prompt and output (arXiv 1909.05858: divide positive logits, multiply
        negative ones), then `- frequency * count - presence * (count > 0)` over the output only (OpenAI).

        Sparse, since a row holds thousands of tokens and a vocabulary 150,000. logits [N, V] float32; M pairs of a row
        and a token that occurs in it, each once: rows, token_ids [M] int64; output_counts [M] int32, 0 where it
        occurs in the prompt alone; the three penalties [N] float32.
        """

    def choose_tokens(
        self,
        logits: Tensor,
        is_known: Tensor,
        temperatures: Tensor,
        seeds: Tensor,
        positions: Tensor,
        truncation: Truncation | None = None,
    ) -> Tensor:
        """The next token of each row, of those that is_known [V] bool allows.

        Where the temperature is 0 the one with the largest logit, of equals the lower id. Else one draw from softmax of
        (logits - their maximum) / temperature by Gumbel-max: the token with the largest sum of it and noise, which is a
        counter hash of seed, position and token (`kernels.gumbel_noise`). So a draw depends on nothing else: not on the
        batch, the device or the run. Before it the truncation drops tokens, at least one stays.

        logits [N, V] float32 or model dtype, which may be overwritten unless all temperatures are 0; temperatures [N]
        float32; seeds, positions [N] int64 -> [2, N] int64: a valid id for every row, and the same with -1 for a row
        that holds a NaN or an infinity above all, known or not, or no known token above -inf.
        """


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of a decoder that decide, with a step's number of tokens, which kernels it launches.

    `num_experts` 0: no expert layers.
    """

    hidden_size: int
    intermediate_size: int  # of dense layers
    itemsize: int  # of the model dtype, bytes
    num_experts: int = 0
    top_k: int = 0
    bucketed_min_tokens: int | None = None  # tokens from which experts are sorted; None: never
    is_quantised: bool = False  # some products have quantised weights


@dataclass(frozen=True, slots=True)
class CompiledAhead:
    """What was compiled before it was launched."""

    num_kernels: int  # that the run launches and this process has not loaded
    num_cached: int  # of them: found on the disk, compiled by an earlier process
    num_processes: int
    failures: tuple[str, ...]  # kernel and error of those that will be compiled, or fail, where they are launched


class KernelsUnavailable(Exception):
    """No implementation of the operations exists for a device. There is no fallback: it would be a silent slowdown."""

    def __init__(self, device: str, reason: str) -> None:
        super().__init__(f"no kernels for device {device!r}: {reason}")
        self.device = device
        self.reason = reason
