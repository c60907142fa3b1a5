"""Chooses the next token of each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from engine.errors import EngineError, GrammarFailed, NonFiniteLogits
from engine.sampling.sampled_token import SampledToken
from engine.sampling.sampling_row import SamplingRow
from engine.structured.token_masks import TokenMasks
from engine.token_logprobs import TokenLogprobs
from kernels.interface import Operations

Forbidden = tuple[Sequence[int], torch.Tensor]  # rows that a grammar holds, and what each may not draw: [n, V] bool


class Sampler:
    """Chooses the next token of each row, in transformers' order: bias, penalties, bans, grammar, temperature, top-k,
    top-p, min-p, draw. A row's token depends on that row alone.
    """

    def __init__(self, ops: Operations, unknown_ids: torch.Tensor | None = None) -> None:
        """`unknown_ids` [U] int64: rows of the embedding that no token of the vocabulary stands for; never chosen."""
        self._ops = ops
        self._unknown_ids = unknown_ids
        self._masks = TokenMasks(torch.get_num_threads())

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken | EngineError]:
        """logits [S, V] float32, one row each; they are overwritten.

        A row that is not finite (NonFiniteLogits), or whose grammar fails (GrammarFailed), fails alone.
        """
        # From what the host knows: computed while the device still works on the logits, for which `tolist` waits.
        forbidden, failures = self._masks_of(rows)
        is_finite = torch.isfinite(logits.amax(dim=-1))  # NaN propagates through amax
        finite = is_finite.tolist()
        if not all(finite):
            logits[~is_finite] = 0.0  # whatever is chosen there is thrown away below
        logprobs = self._raw_logprob_rows(logits, rows)
        self._edit(logits, rows, forbidden)
        token_ids = self._choose(logits, rows)
        results: list[SampledToken | EngineError] = []
        for index, row in enumerate(rows):
            if not finite[index]:
                results.append(NonFiniteLogits(f"logits at position {row.position} are not finite"))
            elif index in failures:
                results.append(failures[index])
            else:
                raw = logprobs.get(index)
                token_logprobs = None if raw is None else self._token_logprobs(raw, token_ids[index], row)
                results.append(SampledToken(token_ids[index], token_logprobs))
        return results

    def _raw_logprob_rows(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> dict[int, torch.Tensor]:
        """Log-softmax [V] of the rows that report it, before anything changes their logits."""
        wanted = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
        return {index: torch.log_softmax(logits[index], dim=-1) for index in wanted}

    def _token_logprobs(self, raw: torch.Tensor, token_id: int, row: SamplingRow) -> TokenLogprobs:
        count = min(row.params.logprobs or 0, raw.shape[0])
        values, ids = raw.topk(count)
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return TokenLogprobs(token_id, float(raw[token_id]), top)

    def _masks_of(self, rows: Sequence[SamplingRow]) -> tuple[Forbidden | None, Mapping[int, GrammarFailed]]:
        """What grammars forbid, None where no row has one; the failures by row: what is chosen there is void."""
        held = {index: row.matcher for index, row in enumerate(rows) if row.matcher is not None}
        if not held:
            return None, {}
        masks, faults = self._masks.forbidden(list(held.values()))
        failures = {index: fault for index, fault in zip(held, faults, strict=True) if fault is not None}
        return (list(held), torch.from_numpy(masks)), failures

    def _edit(self, logits: torch.Tensor, rows: Sequence[SamplingRow], forbidden: Forbidden | None) -> None:
        """Bias, penalties, bans and grammars, in place."""
        for index, row in enumerate(rows):
            if row.params.logit_bias:
                ids = torch.tensor(list(row.params.logit_bias), dtype=torch.int64, device=logits.device)
                bias = torch.tensor(list(row.params.logit_bias.values()), dtype=torch.float32, device=logits.device)
                logits[index].index_add_(0, ids, bias)
        self._penalise(logits, rows)
        for index, row in enumerate(rows):
            if row.banned_token_ids:
                logits[index, list(row.banned_token_ids)] = -torch.inf
        if self._unknown_ids is not None:
            logits.index_fill_(1, self._unknown_ids, -torch.inf)
        if forbidden is not None:
            held, masks = forbidden
            if len(held) == len(rows):
                logits.masked_fill_(masks.to(logits.device), -torch.inf)
            else:
                logits[held] = logits[held].masked_fill_(masks.to(logits.device), -torch.inf)

    def _penalise(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
        row_ids: list[int] = []
        token_ids: list[int] = []
        counts: list[int] = []
        for index, row in enumerate(rows):
            if row.params.has_penalties and row.counts is not None:
                generated = row.counts.generated
                row_ids += [index] * len(generated)
                token_ids += generated.keys()
                counts += generated.values()
        if not row_ids:
            return
        params = [row.params for row in rows]
        self._ops.apply_penalties(
            logits,
            torch.tensor(row_ids, dtype=torch.int64, device=logits.device),
            torch.tensor(token_ids, dtype=torch.int64, device=logits.device),
            torch.tensor(counts, dtype=torch.int32, device=logits.device),
            self._column(logits, [p.repetition_penalty for p in params]),
            self._column(logits, [p.presence_penalty for p in params]),
            self._column(logits, [p.frequency_penalty for p in params]),
        )

    def _column(self, logits: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits.device)

    def _choose(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
        drawn = [index for index, row in enumerate(rows) if not row.params.is_greedy]
        if not drawn:
            return list(self._ops.argmax(logits).tolist())
        chosen = [0] * len(rows)
        greedy = [index for index, row in enumerate(rows) if row.params.is_greedy]
        if greedy:
            for index, token_id in zip(greedy, self._ops.argmax(logits[greedy]).tolist(), strict=True):
                chosen[index] = token_id
        for index, token_id in zip(drawn, self._draw(logits[drawn], [rows[i] for i in drawn]), strict=True):
            chosen[index] = token_id
        return chosen

    def _draw(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
        logits -= logits.amax(dim=-1, keepdim=True)  # the best becomes 0: no temperature, however small, overflows it
        logits /= self._column(logits, [row.params.temperature for row in rows]).unsqueeze(-1)
        truncated = [index for index, row in enumerate(rows) if row.params.truncates]
        if truncated:
            selected = logits[truncated]
            params = [rows[index].params for index in truncated]
            size = logits.shape[-1]
            top_k = torch.tensor([min(p.top_k or size, size) for p in params], device=logits.device)
            self._ops.mask_top_k_top_p_min_p(
                selected,
                top_k,
                self._column(logits, [p.top_p for p in params]),
                self._column(logits, [p.min_p for p in params]),
            )
            logits[truncated] = selected
        seeds = torch.tensor([row.seed for row in rows], dtype=torch.int64, device=logits.device)
        positions = torch.tensor([row.position for row in rows], dtype=torch.int64, device=logits.device)
        return list(self._ops.gumbel_argmax(logits, seeds, positions).tolist())
