"""Chooses the next token of each row of logits.

The host describes the rows of a step in a few arrays, from which the device computes penalties, masks, draws and
log-probabilities. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import EngineError, GrammarFailed, NonFiniteLogits
from engine.request import TokenLogprobs
from engine.sampling_params import MAX_TOP_K, SamplingParams
from engine.scheduling.sequence import TokenCounts
from engine.staging import ArrayStaging, PendingResult
from engine.structured.matcher import GrammarMatcher, TokenMasks
from kernels.interface import Operations
from kernels.operands import Truncation

NOT_FINITE = -1  # stands for the token of a row whose logits are not finite

Part = Literal["logprobs", "bias", "penalties", "banned", "allowed", "forbidden", "draws", "truncation"]

Tensors = Mapping[Part, tuple[torch.Tensor, ...]]  # see `row_arrays`

Arrays = tuple[npt.NDArray[Any], ...]


class Sampler:
    """Chooses the next token of each row, in transformers' order: bias, penalties, bans, grammar, temperature, top-k,
    top-p, min-p, draw. A row's token depends on that row alone. The parameters of all rows reach the device in
    one copy.
    """

    def __init__(self, ops: Operations, device: torch.device, unknown_ids: torch.Tensor | None = None) -> None:
        """unknown_ids [U], int64: ids without a token in the vocabulary; never chosen."""
        self._ops = ops
        self._staging = ArrayStaging(device)
        self._unknown_ids = unknown_ids if unknown_ids is not None and unknown_ids.shape[0] else None
        self._is_known: torch.Tensor | None = None  # [V] bool, made with the first logits
        self._masks = TokenMasks(torch.get_num_threads())
        # On the device, because some operations would copy a Python number there and wait for it.
        self._minus_infinity = torch.full((), -torch.inf, device=device)
        self._not_finite = torch.full((), NOT_FINITE, device=device)

    def sample(self, logits: torch.Tensor, rows: Rows) -> ChosenTokens:
        """Choose a token for each row of logits [S, V], which are overwritten; none where the row is None.

        A row that is not finite (NonFiniteLogits), or whose grammar fails (GrammarFailed), fails alone.
        """
        if are_plain(rows):
            return self._choose_plainly(logits, rows)
        return self.sample_masked(logits, rows, *self._masks_of(rows))  # made while the device works on the logits

    @torch.inference_mode()
    def sample_masked(
        self, logits: torch.Tensor, rows: Rows, forbidden: Arrays | None, failures: Mapping[int, GrammarFailed]
    ) -> ChosenTokens:
        """The same with the grammars' part given: rows, what is forbidden in each [n, V], and the rows that failed."""
        logits = logits.float()
        parts = row_arrays(rows, logits.shape[1])
        if forbidden is not None:
            parts["forbidden"] = forbidden
        given = arrays_to_tensors(parts, self._staging.send)
        is_finite = torch.isfinite(logits.amax(dim=-1))  # NaN propagates through amax
        scored = given["logprobs"][0] if "logprobs" in given else None
        raw = None if scored is None else torch.log_softmax(logits.index_select(0, scored), dim=-1)
        self._edit(logits, given)
        token_ids, sound_ids = self._choose(logits, given)
        tensors = [torch.where(is_finite, sound_ids, self._not_finite)]
        if scored is not None and raw is not None:
            tensors += _logprobs(raw, token_ids.index_select(0, scored), [count for count, _ in scored_rows(rows)])
        return ChosenTokens(token_ids, PendingResult(tuple(tensors), lambda on_host: _answers(on_host, rows, failures)))

    @torch.inference_mode()
    def _choose_plainly(self, logits: torch.Tensor, rows: Rows) -> ChosenTokens:
        parts = draw_arrays(rows, logits.shape[1])
        return chosen_plainly(self._choose(logits, arrays_to_tensors(parts, self._staging.send)), rows)

    def _choose(self, logits: torch.Tensor, given: Tensors) -> torch.Tensor:
        if self._is_known is None:
            self._is_known = known_tokens(logits.shape[1], self._unknown_ids, logits.device)
        temperatures, seeds, positions = given["draws"]
        truncation = Truncation(*given["truncation"]) if "truncation" in given else None
        return self._ops.choose_tokens(logits, self._is_known, temperatures, seeds, positions, truncation)

    def _masks_of(self, rows: Rows) -> tuple[Arrays | None, Mapping[int, GrammarFailed]]:
        """Rows with a grammar and what it forbids [n, V], None where no row has one; and the failures by row, whose
        tokens do not count.
        """
        matchers = {
            index: row.matcher
            for index, row in enumerate(rows)
            if row is not GREEDY_ROW and row is not None and row.matcher is not None
        }
        if not matchers:
            return None, {}
        masks, faults = self._masks.forbidden(list(matchers.values()))
        failures = {index: fault for index, fault in zip(matchers, faults, strict=True) if fault is not None}
        return (np.array(list(matchers), dtype=np.int64), masks), failures

    def _edit(self, logits: torch.Tensor, given: Tensors) -> None:
        """Bias, penalties, bans, what alone is allowed, and grammars, in place."""
        if "bias" in given:
            row_ids, token_ids, bias = given["bias"]
            logits.index_put_((row_ids, token_ids), logits[row_ids, token_ids] + bias)  # each pair is there once
        if "penalties" in given:
            row_ids, token_ids, counts, repetition, presence, frequency = given["penalties"]
            self._ops.apply_penalties(logits, row_ids, token_ids, counts, repetition, presence, frequency)
        if "banned" in given:
            logits.index_put_(given["banned"], self._minus_infinity)
        if "allowed" in given:
            rows, row_ids, token_ids = given["allowed"]
            kept = logits[row_ids, token_ids]
            logits.index_fill_(0, rows, -torch.inf)
            logits.index_put_((row_ids, token_ids), kept)
        if "forbidden" in given:
            rows, masks = given["forbidden"]
            if rows.shape[0] == logits.shape[0]:
                logits.masked_fill_(masks, -torch.inf)
            else:
                logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(masks, -torch.inf))


def _logprobs(raw: torch.Tensor, token_ids: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    """Those of the chosen tokens [W], then values and ids [w, n] of the best for all rows that ask for n, n rising.

    One topk for each n, because which of equal values come last depends on n.
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
    if not scores and not failures and NOT_FINITE not in token_ids and None not in rows:  # as in most steps
        return [SampledToken(token_id, None) for token_id in token_ids]
    logprobs = _read_logprobs(scores, rows, token_ids) if scores else {}
    return [
        NonFiniteLogits(f"the logits of row {index} are not finite")
        if token_id == NOT_FINITE
        else failures.get(index) or (None if row is None else SampledToken(token_id, logprobs.get(index)))
        for index, (row, token_id) in enumerate(zip(rows, token_ids, strict=True))
    ]


def _read_logprobs(scores: Sequence[torch.Tensor], rows: Rows, token_ids: Sequence[int]) -> dict[int, TokenLogprobs]:
    """The results of `_logprobs`, by row."""
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


class SamplingRow(NamedTuple):
    """What the sampler must know about one row of logits. A tuple: it is made for each row of each step."""

    params: SamplingParams
    position: int  # of the token to be drawn: with the seed it decides the draw
    seed: int
    counts: TokenCounts | None = None  # needed where the parameters have penalties
    banned_token_ids: Sequence[int] = ()  # may not be drawn at this position (min_tokens)
    matcher: GrammarMatcher | None = None  # where the sequence stands in its grammar

    @property
    def is_edited(self) -> bool:
        """Whether its logits are changed before a token is chosen, or asked for."""
        params = self.params
        return bool(
            params.logprobs is not None or params.logit_bias or self.banned_token_ids or params.allowed_token_ids
            or self.matcher is not None or (self.counts is not None and params.has_penalties)
        )  # fmt: skip


# Rows from which the best token is taken, and nothing else is asked for; equal in all steps.
GREEDY_ROW = SamplingRow(SamplingParams(temperature=0.0), position=0, seed=0)


class SampledToken(NamedTuple):
    """One chosen token, with its log-probabilities where the request asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class VerifiedTokens:
    """The tokens of a sequence with drafts: those that agree with what was drafted, and the one behind them."""

    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, eq=False, slots=True)
class ChosenTokens:
    """The token of each row, on the device and to be read from there."""

    token_ids: torch.Tensor  # [S] int64; a valid id also for rows that failed or were not drawn
    answers: PendingResult[list[SampledToken | EngineError | None]]  # None: a row that was not drawn


Rows = Sequence[SamplingRow | None]
_Owned = list[tuple[int, SamplingRow]]  # index and row


def are_plain(rows: Rows) -> bool:
    """Whether no row asks for more than a choice among the logits as they are."""
    return not any(row is not GREEDY_ROW and row is not None and row.is_edited for row in rows)


def plain_draws(rows: Rows) -> Arrays | None:
    """Draws and truncation of `draw_arrays`, truncation also where no row drops tokens; None where a row is edited."""
    if not are_plain(rows):
        return None
    parts = draw_arrays(rows, MAX_TOP_K)
    return (*parts["draws"], *(parts.get("truncation") or _truncation(len(rows), MAX_TOP_K)))


def draw_arrays(rows: Rows, vocab_size: int) -> dict[Part, Arrays]:
    """draws: temperatures (0: greedy), seeds and positions; truncation, where a row that is drawn drops tokens: top_k
    (vocab_size, or more: off), top_p, min_p, off where a row drops none. All [S], as `Operations.choose_tokens` takes
    them. None among the rows: a greedy one, not read.
    """
    drawn: list[tuple[int, float, int, int]] = []  # lists: numbers one by one into arrays took twice as long
    truncating: list[tuple[int, int, float, float]] = []
    for index, row in enumerate(rows):
        if row is GREEDY_ROW or row is None:
            continue
        params = row.params
        if params.temperature:
            drawn.append((index, params.temperature, row.seed, row.position))
            if params.truncates:
                top_k = min(params.top_k or vocab_size, vocab_size)
                truncating.append((index, top_k, params.top_p, params.min_p))
    draws = (np.zeros(len(rows), np.float32), np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64))
    _scatter(drawn, draws)
    parts: dict[Part, Arrays] = {"draws": draws}
    if truncating:
        parts["truncation"] = _truncation(len(rows), vocab_size)
        _scatter(truncating, parts["truncation"])
    return parts


def _scatter(numbers: Sequence[tuple[float, ...]], arrays: Arrays) -> None:
    """numbers: of each row its index, and what goes into each array."""
    if numbers:
        indices, *columns = zip(*numbers, strict=True)
        for array, column in zip(arrays, columns, strict=True):
            array[list(indices)] = column


def _truncation(num_rows: int, vocab_size: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """By which nothing is dropped."""
    top_k = np.full(num_rows, vocab_size, dtype=np.int64)
    return top_k, np.ones(num_rows, dtype=np.float32), np.zeros(num_rows, dtype=np.float32)


def chosen_plainly(chosen: torch.Tensor, rows: Rows) -> ChosenTokens:
    """What `Operations.choose_tokens` chose, [2, S], for these rows."""
    return ChosenTokens(chosen[0], PendingResult((chosen[1],), lambda on_host: _answers(on_host, rows, {})))


def known_tokens(vocab_size: int, unknown_ids: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Whether each id may be chosen, [V] bool."""
    is_known = torch.ones(vocab_size, dtype=torch.bool, device=device)
    return is_known if unknown_ids is None else is_known.index_fill_(0, unknown_ids, False)


def row_arrays(rows: Rows, vocab_size: int) -> dict[Part, Arrays]:
    """The parameters of these rows, part by part; parts that no row needs are left out. None: a row that is not drawn.

    logprobs: rows, in the order of `scored_rows`. bias: rows, token ids, what to add. penalties: as
    `Operations.apply_penalties` takes them. banned: rows, token ids. allowed: rows, and their token ids as rows and
    ids. draws and truncation: see `draw_arrays`.
    """
    parts = draw_arrays(rows, vocab_size)
    asking = [  # most steps have only greedy rows: one look at each
        (index, row) for index, row in enumerate(rows) if row is not None and row is not GREEDY_ROW and row.is_edited
    ]
    if asking:
        scored = scored_rows(rows)
        if scored:
            parts["logprobs"] = (_int64([index for _, index in scored]),)
        _add_edits(parts, asking, len(rows))
    return parts


def scored_rows(rows: Rows) -> list[tuple[int, int]]:
    """Alternatives and index of each row with log-probabilities, by the number of alternatives."""
    params = [(index, row.params) for index, row in enumerate(rows) if row is not None]
    return sorted((p.logprobs, index) for index, p in params if p.logprobs is not None)


def arrays_to_tensors(
    parts: Mapping[Part, Arrays], send: Callable[[Sequence[npt.NDArray[Any]]], Sequence[torch.Tensor]]
) -> dict[Part, tuple[torch.Tensor, ...]]:
    """The arrays of `row_arrays` on the device, all of them sent at once."""
    tensors = iter(send([array for arrays in parts.values() for array in arrays]))
    return {part: tuple(next(tensors) for _ in arrays) for part, arrays in parts.items()}


def _add_edits(parts: dict[Part, Arrays], asking: _Owned, num_rows: int) -> None:
    biased = [(index, row.params.logit_bias) for index, row in asking if row.params.logit_bias]
    if biased:
        parts["bias"] = (*_pairs(biased), _float32([value for _, bias in biased for value in bias.values()]))
    counted = [(i, row.counts.generated) for i, row in asking if row.counts is not None and row.params.has_penalties]
    if counted:
        counts = np.array([count for _, generated in counted for count in generated.values()], dtype=np.int32)
        # Rows without penalties keep ones, which are not read. Three arrays, so that each is aligned for the kernels.
        penalties = [np.ones(num_rows, dtype=np.float32) for _ in range(3)]
        for index, row in asking:
            p = row.params
            for column, penalty in zip(
                penalties, (p.repetition_penalty, p.presence_penalty, p.frequency_penalty), strict=True
            ):
                column[index] = penalty
        parts["penalties"] = (*_pairs(counted), counts, *penalties)
    banned = [(index, row.banned_token_ids) for index, row in asking if row.banned_token_ids]
    if banned:
        parts["banned"] = _pairs(banned)
    allowed = [(index, row.params.allowed_token_ids) for index, row in asking if row.params.allowed_token_ids]
    if allowed:
        parts["allowed"] = (_int64([index for index, _ in allowed]), *_pairs(allowed))


def _pairs(owned: Sequence[tuple[int, Mapping[int, Any] | Sequence[int]]]) -> tuple[npt.NDArray[np.int64], ...]:
    """Rows, and the token ids of each."""
    rows = np.repeat(_int64([index for index, _ in owned]), [len(token_ids) for _, token_ids in owned])
    return rows, _int64([token_id for _, token_ids in owned for token_id in token_ids])


def _int64(values: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def _float32(values: Sequence[float]) -> npt.NDArray[np.float32]:
    return np.array(values, dtype=np.float32)
