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


def row_arrays(rows: Rows, vocab_size: int) -> dict[Part, Arrays]:
    """What the parameters of these rows ask for, part by part; a part that no row asks for is not there.

    None: a row that is not drawn, which no part touches. logprobs: rows, in the order of `scored_rows`.
    """
    drawn = [(index, row) for index, row in enumerate(rows) if row is not None]
    parts: dict[Part, Arrays] = {}
    scored = scored_rows(rows)
    if scored:
        parts["logprobs"] = (_int64([index for _, index in scored]),)
    _add_edits(parts, drawn, len(rows))
    _add_draws(parts, drawn, len(rows), vocab_size)
    return parts


def arrays_to_tensors(
    parts: Mapping[Part, Arrays], send: Callable[[Sequence[npt.NDArray[Any]]], Sequence[torch.Tensor]]
) -> dict[Part, tuple[torch.Tensor, ...]]:
    """The same on the device, all of it sent at once."""
    tensors = iter(send([array for arrays in parts.values() for array in arrays]))
    return {part: tuple(next(tensors) for _ in arrays) for part, arrays in parts.items()}


def scored_rows(rows: Rows) -> list[tuple[int, int]]:
    """Alternatives and index of each row with log-probabilities, by the number of alternatives."""
    params = [(index, row.params) for index, row in enumerate(rows) if row is not None]
    return sorted((p.logprobs, index) for index, p in params if p.logprobs is not None)


def _add_edits(parts: dict[Part, Arrays], drawn: Sequence[tuple[int, SamplingRow]], num_rows: int) -> None:
    """bias: rows, token ids, what to add. penalties: as `Operations.apply_penalties` takes them. banned: rows, token
    ids.
    """
    biased = [(index, row.params.logit_bias) for index, row in drawn if row.params.logit_bias]
    if biased:
        owners, values = _pairs(biased), [value for _, bias in biased for value in bias.values()]
        parts["bias"] = (*owners, _float32(values))
    penalised = [(index, row) for index, row in drawn if row.params.has_penalties and row.counts is not None]
    counted = [(index, row.counts.generated) for index, row in penalised if row.counts is not None]
    if counted:
        counts = np.array([count for _, generated in counted for count in generated.values()], dtype=np.int32)
        penalties = np.ones((3, num_rows), dtype=np.float32)
        for index, row in penalised:
            params = row.params
            penalties[:, index] = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        parts["penalties"] = (*_pairs(counted), counts, *penalties)
    banned = [(index, row.banned_token_ids) for index, row in drawn if row.banned_token_ids]
    if banned:
        parts["banned"] = _pairs(banned)


def _add_draws(
    parts: dict[Part, Arrays], drawn: Sequence[tuple[int, SamplingRow]], num_rows: int, vocab_size: int
) -> None:
    """draws: temperatures, seeds, positions, of the rows with a draw. places: these rows and the greedy ones, where not
    all have a draw. truncation: top_k, top_p, min_p, likewise; off where a row has none.
    """
    random = [(index, row) for index, row in drawn if not row.params.is_greedy]
    if not random:
        return
    params = [row.params for _, row in random]
    seeds, positions = _int64([row.seed for _, row in random]), _int64([row.position for _, row in random])
    parts["draws"] = (_float32([p.temperature for p in params]), seeds, positions)
    if len(random) < num_rows:
        greedy = [index for index, row in drawn if row.params.is_greedy]
        parts["places"] = (_int64([index for index, _ in random]), _int64(greedy))
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
