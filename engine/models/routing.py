"""Routing of tokens to experts where it is no softmax: DeepSeek-V3's, which GLM-4.5 has (arXiv 2412.19437)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.operands import RoutedExperts

MIN_SUM = 1e-20  # of the weights that are divided by it: transformers'


@dataclass(frozen=True, eq=False)
class SigmoidRouting:
    """Scores each expert by the sigmoid of its logit, and chooses the best of the best groups.

    A bias that evens out the experts' load decides who is chosen and does not change the weights. torch's operations
    alone, on CPUs and GPUs alike, and none of them waits for the device.
    """

    bias: torch.Tensor  # [E], float32
    num_groups: int  # of E / num_groups experts that lie side by side
    chosen_groups: int
    top_k: int
    renormalise: bool
    scale: float  # of the weights

    def route(self, router_logits: torch.Tensor) -> RoutedExperts:
        """router_logits [T, E] float32. Ties go to the lower id. A row with a NaN gets a weight of NaN."""
        scores = _sigmoid(router_logits)
        for_choice = scores + self.bias
        if self.chosen_groups < self.num_groups:
            for_choice = for_choice.masked_fill(~self._is_in_chosen_group(for_choice), -torch.inf)
        # A stable sort, since torch.topk promises no order among equals.
        expert_ids = for_choice.sort(dim=-1, descending=True, stable=True).indices[:, : self.top_k].contiguous()
        weights = scores.gather(1, expert_ids)
        if self.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + MIN_SUM)
        return RoutedExperts(weights * self.scale, expert_ids)

    def _is_in_chosen_group(self, scores: torch.Tensor) -> torch.Tensor:
        """[T, E] of bool. A group is worth the sum of its two best scores."""
        groups = scores.view(scores.shape[0], self.num_groups, scores.shape[1] // self.num_groups)
        worth = groups.topk(2, dim=-1).values.sum(-1)
        best = worth.sort(dim=-1, descending=True, stable=True).indices[:, : self.chosen_groups]
        is_chosen = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, best, True)
        return is_chosen[:, :, None].expand_as(groups).flatten(1)


def _sigmoid(logits: torch.Tensor) -> torch.Tensor:
    """As the softmax over a logit and 0: torch's sigmoid has other bits where a tensor's last elements fill no vector,
    so that a row's would depend on how many rows there are.
    """
    return torch.stack((logits, torch.zeros_like(logits)), dim=-1).softmax(-1)[..., 0]
