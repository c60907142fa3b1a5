"""Chooses the next token of each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np
import torch

from engine.errors import EngineError, GrammarFailed, NonFiniteLogits
from engine.execution.array_staging import ArrayStaging
from engine.execution.pending_result import PendingResult
from engine.sampling.chosen_tokens import ChosenTokens
from engine.sampling.row_arrays import Arrays, Part, Rows, arrays_to_tensors, row_arrays, scored_rows
from engine.sampling.sampled_token import SampledToken
from engine.structured.token_masks import TokenMasks
from engine.token_logprobs import TokenLogprobs
from kernels.interface import Operations

NOT_FINITE = -1  # stands for the token of a row whose logits are not finite
Tensors = Mapping[Part, tuple[torch.Tensor, ...]]  # see `row_arrays`


class Sampler:
    """Chooses the next token of each row, in transformers' order: bias, penalties, bans, grammar, temperature, top-k,
    top-p, min-p, draw. A row's token depends on that row alone.

    Queues its work and returns: nothing here waits for the device, and what the rows ask for goes there in one copy.
    """

    def __init__(self, ops: Operations, device: torch.device, unknown_ids: torch.Tensor | None = None) -> None:
        """`unknown_ids` [U] int64: rows of the embedding that no token of the vocabulary stands for; never chosen."""
        self._ops = ops
        self._staging = ArrayStaging(device)
        self._unknown_ids = unknown_ids
        self._masks = TokenMasks(torch.get_num_threads())
        # On the device: a number of Python's would be copied there, and waited for, by some operations.
        self._minus_infinity = torch.full((), -torch.inf, device=device)
        self._not_finite = torch.full((), NOT_FINITE, device=device)

    def sample(self, logits: torch.Tensor, rows: Rows) -> ChosenTokens:
        """logits [S, V] float32, one row each, None for one that is only looked at; they are overwritten.

        A row that is not finite (NonFiniteLogits), or whose grammar fails (GrammarFailed), fails alone.
        """
        return self.sample_masked(logits, rows, *self._masks_of(rows))  # masks while the device works on the logits

    @torch.inference_mode()
    def sample_masked(
        self, logits: torch.Tensor, rows: Rows, forbidden: Arrays | None, failures: Mapping[int, GrammarFailed]
    ) -> ChosenTokens:
        """The same with the grammars' part known: rows and what is forbidden there [n, V], and the rows that failed."""
        parts = row_arrays(rows, logits.shape[1])
        if forbidden is not None:
            parts["forbidden"] = forbidden
        given = arrays_to_tensors(parts, self._staging.send)
        is_finite = torch.isfinite(logits.amax(dim=-1))  # NaN propagates through amax
        scored = given["logprobs"][0] if "logprobs" in given else None
        raw = None if scored is None else torch.log_softmax(logits.index_select(0, scored), dim=-1)
        self._edit(logits, given)
        token_ids = self._choose(logits, given)  # of a row that is not finite a valid one, too
        tensors = [torch.where(is_finite, token_ids, self._not_finite)]
        if scored is not None and raw is not None:
            tensors += _logprobs(raw, token_ids.index_select(0, scored), [count for count, _ in scored_rows(rows)])
        return ChosenTokens(token_ids, PendingResult(tuple(tensors), lambda on_host: _answers(on_host, rows, failures)))

    def _masks_of(self, rows: Rows) -> tuple[Arrays | None, Mapping[int, GrammarFailed]]:
        """Rows with a grammar and what that forbids [n, V], None where no row has one; the failures by row: what is
        chosen there is void.
        """
        held = {index: row.matcher for index, row in enumerate(rows) if row is not None and row.matcher is not None}
        if not held:
            return None, {}
        masks, faults = self._masks.forbidden(list(held.values()))
        failures = {index: fault for index, fault in zip(held, faults, strict=True) if fault is not None}
        return (np.array(list(held), dtype=np.int64), masks), failures

    def _edit(self, logits: torch.Tensor, given: Tensors) -> None:
        """Bias, penalties, bans and grammars, in place."""
        if "bias" in given:
            row_ids, token_ids, bias = given["bias"]
            logits.index_put_((row_ids, token_ids), logits[row_ids, token_ids] + bias)  # each pair is there once
        if "penalties" in given:
            row_ids, token_ids, counts, repetition, presence, frequency = given["penalties"]
            self._ops.apply_penalties(logits, row_ids, token_ids, counts, repetition, presence, frequency)
        if "banned" in given:
            logits.index_put_(given["banned"], self._minus_infinity)
        if self._unknown_ids is not None:
            logits.index_fill_(1, self._unknown_ids, -torch.inf)
        if "forbidden" in given:
            held, masks = given["forbidden"]
            if held.shape[0] == logits.shape[0]:
                logits.masked_fill_(masks, -torch.inf)
            else:
                logits.index_copy_(0, held, logits.index_select(0, held).masked_fill_(masks, -torch.inf))

    def _choose(self, logits: torch.Tensor, given: Tensors) -> torch.Tensor:
        if "draws" not in given:
            return self._ops.argmax(logits)
        if "places" not in given:
            return self._draw(logits, given)
        random, greedy = given["places"]
        token_ids = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
        if greedy.shape[0]:
            token_ids.index_copy_(0, greedy, self._ops.argmax(logits.index_select(0, greedy)))
        return token_ids.index_copy_(0, random, self._draw(logits.index_select(0, random), given))

    def _draw(self, logits: torch.Tensor, given: Tensors) -> torch.Tensor:
        temperatures, seeds, positions = given["draws"]
        logits -= logits.amax(dim=-1, keepdim=True)  # the best becomes 0: no temperature, however small, overflows it
        logits /= temperatures.unsqueeze(-1)
        if "truncation" in given:
            self._ops.mask_top_k_top_p_min_p(logits, *given["truncation"])
        return self._ops.gumbel_argmax(logits, seeds, positions)


def _logprobs(raw: torch.Tensor, token_ids: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    """Of the chosen tokens [W], then values and ids [w, n] of the best for all rows that ask for n, which rises.

    Rows are not given more than they ask for: which of equal ones come last hangs on n.
    """
    tensors = [raw.gather(1, token_ids.unsqueeze(1)).squeeze(1)]
    start = 0
    for count, group in groupby(counts):
        end = start + len(list(group))
        tensors += raw[start:end].topk(min(count, raw.shape[1]))
        start = end
    return tensors


def _answers(
    on_host: Sequence[torch.Tensor], rows: Rows, failures: Mapping[int, GrammarFailed]
) -> list[SampledToken | EngineError | None]:
    chosen, *scores = on_host
    token_ids = chosen.tolist()
    logprobs = _read_logprobs(scores, rows, token_ids) if scores else {}
    return [
        NonFiniteLogits(f"the logits of row {index} are not finite")
        if token_id == NOT_FINITE
        else failures.get(index) or (None if row is None else SampledToken(token_id, logprobs.get(index)))
        for index, (row, token_id) in enumerate(zip(rows, token_ids, strict=True))
    ]


def _read_logprobs(scores: Sequence[torch.Tensor], rows: Rows, token_ids: Sequence[int]) -> dict[int, TokenLogprobs]:
    """What `_logprobs` wrote, by row."""
    chosen, *best = scores
    top = [
        tuple(zip(ids, values, strict=True))
        for group, group_ids in zip(best[::2], best[1::2], strict=True)
        for values, ids in zip(group.tolist(), group_ids.tolist(), strict=True)
    ]
    return {
        index: TokenLogprobs(token_ids[index], logprob, alternatives)
        for (_, index), logprob, alternatives in zip(scored_rows(rows), chosen.tolist(), top, strict=True)
    }
