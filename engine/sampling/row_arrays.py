"""What the host says about the rows of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling.sampling_row import SamplingRow

Arrays = tuple[npt.NDArray[Any], ...]
Part = Literal["logprobs", "bias", "penalties", "banned", "forbidden", "places", "draws", "truncation"]
Rows = Sequence[SamplingRow | None]
_Owned = list[tuple[int, SamplingRow]]  # index and row


def row_arrays(rows: Rows, vocab_size: int) -> dict[Part, Arrays]:
    """What the parameters of these rows ask for, part by part; a part that no row asks for is not there.

    None: a row that is not drawn, which no part touches. logprobs: rows, in the order of `scored_rows`. bias: rows,
    token ids, what to add. penalties: as `Operations.apply_penalties` takes them. banned: rows, token ids. Of the rows
    that are not greedy, draws: temperatures, seeds, positions; truncation: top_k, top_p, min_p, off where a row has
    none; places: their indices and those of the greedy ones, where not all rows have a draw.
    """
    parts: dict[Part, Arrays] = {}
    asking = [  # most steps have greedy rows and nothing else: one look at each
        (index, row)
        for index, row in enumerate(rows)
        if row is not None
        and (row.params.temperature or row.params.logprobs is not None or row.params.logit_bias
             or row.counts is not None or row.banned_token_ids)
    ]  # fmt: skip
    if asking:
        scored = scored_rows(rows)
        if scored:
            parts["logprobs"] = (_int64([index for _, index in scored]),)
        _add_edits(parts, asking, len(rows))
        _add_draws(parts, asking, rows, vocab_size)
    return parts


def scored_rows(rows: Rows) -> list[tuple[int, int]]:
    """Alternatives and index of each row with log-probabilities, by the number of alternatives."""
    params = [(index, row.params) for index, row in enumerate(rows) if row is not None]
    return sorted((p.logprobs, index) for index, p in params if p.logprobs is not None)


def arrays_to_tensors(
    parts: Mapping[Part, Arrays], send: Callable[[Sequence[npt.NDArray[Any]]], Sequence[torch.Tensor]]
) -> dict[Part, tuple[torch.Tensor, ...]]:
    """The same on the device, all of it sent at once."""
    tensors = iter(send([array for arrays in parts.values() for array in arrays]))
    return {part: tuple(next(tensors) for _ in arrays) for part, arrays in parts.items()}


def _add_edits(parts: dict[Part, Arrays], asking: _Owned, num_rows: int) -> None:
    biased = [(index, row.params.logit_bias) for index, row in asking if row.params.logit_bias]
    if biased:
        parts["bias"] = (*_pairs(biased), _float32([value for _, bias in biased for value in bias.values()]))
    counted = [(i, row.counts.generated) for i, row in asking if row.counts is not None and row.params.has_penalties]
    if counted:
        counts = np.array([count for _, generated in counted for count in generated.values()], dtype=np.int32)
        # Rows that are not counted keep ones, unread. Three arrays, not one: each is aligned as kernels like it.
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


def _add_draws(parts: dict[Part, Arrays], asking: _Owned, rows: Rows, vocab_size: int) -> None:
    drawn = [(index, row) for index, row in asking if not row.params.is_greedy]
    if not drawn:
        return
    params = [row.params for _, row in drawn]
    seeds, positions = _int64([row.seed for _, row in drawn]), _int64([row.position for _, row in drawn])
    parts["draws"] = (_float32([p.temperature for p in params]), seeds, positions)
    if len(drawn) < len(rows):
        greedy = [index for index, row in enumerate(rows) if row is not None and row.params.is_greedy]
        parts["places"] = (_int64([index for index, _ in drawn]), _int64(greedy))
    if any(p.truncates for p in params):
        top_k = _int64([min(p.top_k or vocab_size, vocab_size) for p in params])
        parts["truncation"] = (top_k, _float32([p.top_p for p in params]), _float32([p.min_p for p in params]))


def _pairs(owned: Sequence[tuple[int, Mapping[int, Any] | Sequence[int]]]) -> tuple[npt.NDArray[np.int64], ...]:
    """Rows, and the token ids of each."""
    rows = np.repeat(_int64([index for index, _ in owned]), [len(token_ids) for _, token_ids in owned])
    return rows, _int64([token_id for _, token_ids in owned for token_id in token_ids])


def _int64(values: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def _float32(values: Sequence[float]) -> npt.NDArray[np.float32]:
    return np.array(values, dtype=np.float32)
