"""A mixture-of-experts layer with uniform routing, and the same steps by PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (the customary name)

from kernels.expert_types import ExpertLayout, RoutedExperts
from tests.benchmarks.model_shape import ModelShape
from tests.benchmarks.tensors import random

WEIGHT_SCALE = 0.02  # so that products of 2,048 terms stay near 1


class ExpertInputs:
    """Tensors of one layer and one step."""

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
        """`route_topk`, renormalised."""
        weights, ids = torch.softmax(self.logits.float(), dim=-1).topk(self.top_k, dim=-1)
        return RoutedExperts(weights / weights.sum(dim=-1, keepdim=True), ids)

    def sort(self) -> ExpertLayout:
        """`sort_tokens_by_expert`, without a wait for the GPU."""
        ordered, pair_ids = self.routed.expert_ids.flatten().sort(stable=True)
        experts = torch.arange(self.num_experts + 1, device=ordered.device)
        return ExpertLayout(pair_ids, torch.searchsorted(ordered, experts), self.top_k)

    def grouped_gate_up(self) -> torch.Tensor:
        """`grouped_gemm` with gather."""
        return F.grouped_mm(self.x[self.pair_tokens], self.gate_up.transpose(-2, -1), offs=self.group_ends)

    def grouped_down(self, hidden: torch.Tensor) -> torch.Tensor:
        """`grouped_gemm` without gather."""
        return F.grouped_mm(hidden, self.down.transpose(-2, -1), offs=self.group_ends)

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """`combine_experts`, with the weights rounded to the model dtype so that it is one product."""
        by_pair = torch.empty_like(rows)
        by_pair[self.layout.pair_ids] = rows
        weights = self.routed.weights.to(rows.dtype)[:, None]
        return torch.bmm(weights, by_pair.view(-1, self.top_k, rows.shape[1])).squeeze(1)

    def experts(self) -> torch.Tensor:
        """The layer from routed tokens on, with the layout of the first routing."""
        self.sort()
        gate, up = self.grouped_gate_up().chunk(2, dim=-1)
        return self.combine(self.grouped_down(F.silu(gate).mul_(up)))

    def layer(self) -> torch.Tensor:
        """The layer from the router's logits on."""
        self.route()
        return self.experts()
