"""The operations from logits to tokens: the greedy choice, penalties, truncation and seeded draws.

The draws are `kernels.gumbel_noise` line by line, in Python integers and floats.
"""

from __future__ import annotations

import math
import struct

import torch

from kernels import gumbel_noise as spec
from kernels.operands import Truncation

_WORD = 0xFFFFFFFF


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The index of each row's largest value, [N, V] -> [N]: of equals the first, and NaN counts as the largest."""
    winners = []
    for row in logits.tolist():
        best = 0
        for token, value in enumerate(row):
            # `x != x` is how a NaN shows; the first NaN ends the search.
            if row[best] == row[best] and (value > row[best] or value != value):  # noqa: PLR0124
                best = token
        winners.append(best)
    return torch.tensor(winners, dtype=torch.int64)


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """See `Operations.apply_penalties`. One token at a time."""
    for row, token, count in zip(rows.tolist(), token_ids.tolist(), output_counts.tolist(), strict=True):
        value = logits[row, token].clone()
        value = value * repetition[row] if value < 0 else value / repetition[row]
        value = value - frequency[row] * count
        logits[row, token] = value - presence[row] if count > 0 else value


def mask_top_k_top_p_min_p(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> None:
    """In place: -inf for what `Truncation` drops of scores [N, V] float32. One row at a time."""
    for row, k, p, least in zip(logits, top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True):
        if k < row.shape[0]:
            kth_largest = row.sort(descending=True).values[k - 1]
            row[row < kth_largest] = -torch.inf
        if p < 1:
            # Upwards, of equal values the higher token first, so that the lower one stays.
            ids = torch.tensor(sorted(range(row.shape[0]), key=lambda token: (float(row[token]), -token)))
            mass = row[ids].softmax(0).cumsum(0)
            dropped = ids[mass <= 1 - p]
            row[dropped[dropped != ids[-1]]] = -torch.inf
        if least > 0:
            probabilities = row.softmax(0)
            row[probabilities < least * probabilities.max()] = -torch.inf


def gumbel_argmax(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The largest sum of a logit and its noise -> [N]: what `choose_tokens` draws. One token at a time."""
    drawn = torch.empty(logits.shape[0], dtype=torch.int64)
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        noise = [gumbel_noise(seed, position, i) if x > -math.inf else 0.0 for i, x in enumerate(logits[row].tolist())]
        drawn[row] = (logits[row] + torch.tensor(noise)).argmax()
    return drawn


def choose_tokens(
    logits: torch.Tensor,
    is_known: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    truncation: Truncation | None = None,
) -> torch.Tensor:
    """See `Operations.choose_tokens`. A row at a time."""
    chosen = torch.zeros(2, logits.shape[0], dtype=torch.int64)
    chosen[1] = -1
    for row, temperature in enumerate(temperatures.tolist()):
        values = logits[row].tolist()
        known = [value if is_token else -math.inf for value, is_token in zip(values, is_known.tolist(), strict=True)]
        if not all(value < math.inf for value in values) or max(known) == -math.inf:
            continue
        scores = torch.tensor([known])
        if temperature:
            scores = (scores - max(known)) / temperatures[row]
            if truncation is not None:
                mask_top_k_top_p_min_p(scores, *(each[row : row + 1] for each in truncation))
            chosen[:, row] = gumbel_argmax(scores, seeds[row : row + 1], positions[row : row + 1])
        else:
            chosen[:, row] = argmax(scores)
    return chosen


def gumbel_noise(seed: int, position: int, token: int) -> float:
    """The noise of one token."""
    x = _mix(_key(spec.KEY_START_FIRST, seed, position) + token * spec.TOKEN_STEP)
    x = _mix(x ^ _key(spec.KEY_START_SECOND, seed, position))
    v = min(_round(_round(_round(x >> 1) + 0.5) * 2.0**-31), 1 - 2.0**-24)
    mantissa, exponent = _split(_round(1 - v))
    f = -v if exponent == 0 else _round(mantissa - 1)
    exponential = -_series(f, exponent)
    mantissa, exponent = _split(exponential)
    return -_series(_round(mantissa - 1), exponent)


def _key(start: int, seed: int, position: int) -> int:
    key = _mix(start + (seed & _WORD))
    key = _mix(key ^ (seed >> 32 & _WORD))
    key = _mix(key + (position & _WORD))
    return _mix(key ^ (position >> 32 & _WORD))


def _mix(x: int) -> int:
    x &= _WORD
    x ^= x >> 16
    x = x * spec.MIX_FIRST & _WORD
    x ^= x >> 15
    x = x * spec.MIX_SECOND & _WORD
    return x ^ x >> 16


def _round(x: float) -> float:
    """To float32. A sum or product of two float32 numbers computed in float64 and rounded so is correctly rounded."""
    rounded: float = struct.unpack("f", struct.pack("f", x))[0]
    return rounded


def _split(x: float) -> tuple[float, int]:
    bits: int = struct.unpack("I", struct.pack("f", x))[0]
    mantissa: float = struct.unpack("f", struct.pack("I", bits & 0x007FFFFF | 0x3F800000))[0]
    exponent = (bits >> 23) - 127
    return (mantissa * 0.5, exponent + 1) if mantissa > spec.SQRT2 else (mantissa, exponent)


def _series(f: float, exponent: int) -> float:
    z = _round(f * f)
    p = spec.LOG1P_COEFFICIENTS[-1]
    for coefficient in reversed(spec.LOG1P_COEFFICIENTS[:-1]):
        p = _round(_round(p * f) + coefficient)
    y = _round(_round(f * z) * p)
    y = _round(y + _round(exponent * spec.LN2_LOW))
    y = _round(y - _round(0.5 * z))
    return _round(_round(f + y) + _round(exponent * spec.LN2_HIGH))
