"""The oracle: transformers' own greedy continuation, with the margin of every choice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

TIE = 1e-4  # two logits closer than this are a tie: rounding may decide between them


@dataclass(frozen=True)
class ReferenceContinuation:
    """What transformers generates greedily after a prompt."""

    token_ids: list[int]
    margins: list[float]  # best minus second best logit at each step, of the tokens that may be chosen
    logits: torch.Tensor  # [num_tokens, V], float32


def continue_greedily(
    model: Any, prompts: Sequence[Sequence[int]], num_tokens: int, suppressed: Sequence[int]
) -> list[ReferenceContinuation]:
    """Continue each prompt without the `suppressed` ids; prompts of one length share a batch: nothing is padded."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_length[len(prompt)].append(index)
    results: dict[int, ReferenceContinuation] = {}
    for indices in by_length.values():
        ids = torch.tensor([list(prompts[index]) for index in indices])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            suppress_tokens=list(suppressed),
            output_logits=True,
            output_scores=True,
            return_dict_in_generate=True,
        )
        logits = torch.stack(out.logits, dim=1).float()  # [batch, num_tokens, V]
        best = torch.stack(out.scores, dim=1).topk(2, dim=-1).values
        for row, index in enumerate(indices):
            results[index] = ReferenceContinuation(
                token_ids=out.sequences[row, ids.shape[1] :].tolist(),
                margins=(best[row, :, 0] - best[row, :, 1]).tolist(),
                logits=logits[row],
            )
    return [results[index] for index in range(len(prompts))]


def count_ties_where_it_differs(expected: ReferenceContinuation, found: Sequence[int]) -> int:
    """0 if equal, 1 if the first difference is at a tie of the reference; anything else fails."""
    assert len(found) == len(expected.token_ids)
    for step, (wanted, got) in enumerate(zip(expected.token_ids, found, strict=True)):
        if wanted != got:
            margin = expected.margins[step]
            assert margin <= TIE, f"step {step}: token {got}, not {wanted}, at a margin of {margin}"
            return 1
    return 0
