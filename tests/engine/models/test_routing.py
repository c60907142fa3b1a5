"""Routing by sigmoids against transformers' own router, and what the scheduler's order may not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

from engine.models.routing import SigmoidRouting

NUM_EXPERTS, HIDDEN = 24, 16


def _routers(**options: Any) -> tuple[SigmoidRouting, Any]:
    """Ours and transformers', with one bias and, of transformers' alone, a weight."""
    config = Glm4MoeConfig(n_routed_experts=NUM_EXPERTS, hidden_size=HIDDEN, **options)
    theirs = Glm4MoeTopkRouter(config)
    draws = torch.Generator().manual_seed(1)
    theirs.weight.data = torch.randn(NUM_EXPERTS, HIDDEN, generator=draws)
    theirs.e_score_correction_bias.copy_(0.3 * torch.randn(NUM_EXPERTS, generator=draws))
    ours = SigmoidRouting(
        bias=theirs.e_score_correction_bias,
        num_groups=config.n_group,
        chosen_groups=config.topk_group,
        top_k=config.num_experts_per_tok,
        renormalise=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
    )
    return ours, theirs


@pytest.mark.parametrize(
    "options",
    [
        {"num_experts_per_tok": 4},
        {"num_experts_per_tok": 1, "n_group": 12, "topk_group": 1},
        {"num_experts_per_tok": 6, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
        {"num_experts_per_tok": 3, "n_group": 6, "topk_group": 3, "norm_topk_prob": False},
        {"num_experts_per_tok": 24, "n_group": 2, "topk_group": 2},
    ],
)
def test_experts_and_weights_are_transformers(options: dict[str, Any]) -> None:
    ours, theirs = _routers(**options)
    x = torch.randn(200, HIDDEN, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits, weights, expert_ids = theirs(x)
    found = ours.route(logits)
    assert found.expert_ids.dtype is torch.int64
    assert [set(row) for row in found.expert_ids.tolist()] == [set(row) for row in expert_ids.tolist()]
    dense = [
        torch.zeros(200, NUM_EXPERTS).scatter_(1, ids, w)
        for ids, w in ((found.expert_ids, found.weights), (expert_ids, weights))
    ]
    torch.testing.assert_close(*dense, atol=1e-6, rtol=1e-6)


def test_equal_scores_go_to_the_lower_id() -> None:
    ours, _ = _routers(num_experts_per_tok=4, n_group=4, topk_group=2)
    even = SigmoidRouting(torch.zeros(NUM_EXPERTS), 4, 2, 4, ours.renormalise, 1.0)
    assert even.route(torch.zeros(2, NUM_EXPERTS)).expert_ids.tolist() == [[0, 1, 2, 3]] * 2


def test_a_row_has_the_same_bits_whatever_is_beside_it() -> None:
    ours, _ = _routers(num_experts_per_tok=5, n_group=4, topk_group=3)
    logits = torch.randn(67, NUM_EXPERTS, generator=torch.Generator().manual_seed(3))
    together = ours.route(logits)
    for row in range(67):
        alone = ours.route(logits[row : row + 1])
        assert torch.equal(alone.weights[0], together.weights[row])
        assert torch.equal(alone.expert_ids[0], together.expert_ids[row])


def test_a_row_with_nan_shows_it_and_names_experts_that_exist() -> None:
    ours, _ = _routers(num_experts_per_tok=5, n_group=4, topk_group=3)
    found = ours.route(torch.full((1, NUM_EXPERTS), torch.nan))
    assert bool(found.weights.isnan().all())
    assert 0 <= int(found.expert_ids.min()) <= int(found.expert_ids.max()) < NUM_EXPERTS
