"""Draws tokens by Gumbel-max with a seed: `kernels.gumbel_noise`, computed only for the tokens that can win."""

from __future__ import annotations

import torch

from kernels import gumbel_noise as spec
from kernels.cpu.sampling import argmax, mask_top_k_top_p_min_p
from kernels.operands import Truncation


def gumbel_argmax(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The largest sum of a logit [N, V] and its noise -> [N]: what `choose_tokens` draws. See `kernels.gumbel_noise`.

    Exact, without the logarithms of a whole vocabulary: the winner's score is at least the likeliest token's, which
    bounds how small v must be for a token to win. Few pass, and only their noise is computed. A row whose largest logit
    is not finite (NaN, +inf, or all -inf) is decided by it alone: noise cannot change an argmax among those.
    """
    top_ids = argmax(logits)
    tops = logits.gather(1, top_ids[:, None]).squeeze(1)
    drawn = top_ids.clone()
    keys = _row_keys(seeds, positions)
    bounds = tops + _noise(keys, top_ids)
    # Compared with a margin for the rounding of the sums and of exp, so that not even a tie is missed.
    bounds -= 1e-3 + bounds.abs() * 1e-6
    for row in tops.isfinite().nonzero().flatten().tolist():  # row by row: one vocabulary stays in the L2 cache
        drawn[row] = _draw(logits[row], keys[:, row], bounds[row])
    return drawn


def choose_tokens(
    logits: torch.Tensor,
    is_known: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    truncation: Truncation | None = None,
) -> torch.Tensor:
    """See `Operations.choose_tokens`."""
    logits = logits.float()
    unknown = is_known.logical_not().nonzero().squeeze(1)
    chosen = _best_known(logits, unknown)
    drawn = (temperatures > 0).nonzero().squeeze(1)
    if not drawn.shape[0]:
        return chosen
    scores = logits if drawn.shape[0] == logits.shape[0] else logits.index_select(0, drawn)
    scores.index_fill_(1, unknown, -torch.inf)
    scores -= scores.gather(1, chosen[0].index_select(0, drawn).unsqueeze(1))
    temperatures, seeds, positions = (each.index_select(0, drawn) for each in (temperatures, seeds, positions))
    scores.div_(temperatures.unsqueeze(1))
    if truncation is not None:
        mask_top_k_top_p_min_p(scores, *(each.index_select(0, drawn) for each in truncation))
    chosen[0].index_copy_(0, drawn, gumbel_argmax(scores, seeds, positions))
    chosen[1] = torch.where(chosen[1] < 0, -1, chosen[0])
    return chosen


def _best_known(logits: torch.Tensor, unknown: torch.Tensor) -> torch.Tensor:
    """What `Operations.choose_tokens` answers where all temperatures are 0. logits are written and put back; unknown:
    ids, int64.
    """
    is_sound = torch.ones(logits.shape[0], dtype=torch.bool)
    of_unknown = logits.index_select(1, unknown)
    if unknown.shape[0]:
        is_sound = of_unknown.amax(-1) < torch.inf  # a NaN propagates, and is below nothing
        logits = logits.index_fill_(1, unknown, -torch.inf)
    token_ids = argmax(logits)  # a NaN counts as the largest, so one look at it says whether a row is finite
    is_sound &= logits.gather(1, token_ids.unsqueeze(1)).isfinite().squeeze(1)
    logits.index_copy_(1, unknown, of_unknown)
    return torch.stack((token_ids, torch.where(is_sound, token_ids, -1)))


def _draw(logits: torch.Tensor, key: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """logits [V], key [2] int32, bound: a little below the score of some token -> the winner."""
    tokens = (logits >= bound - spec.MAX_NOISE).nonzero().flatten()
    headroom = logits.index_select(0, tokens).sub_(bound)
    v = _uniform(key, tokens)
    # noise = -log(-log1p(-v)) <= -log(v), so a winner has v <= exp(logit - bound).
    passed = (v <= headroom.exp_()).nonzero().flatten()
    tokens = tokens.index_select(0, passed)
    scores = logits.index_select(0, tokens) + _noise_of(v.index_select(0, passed))
    return tokens[scores.argmax()]  # the first, so the lowest, of equals


def gumbel_noise(seed: int, position: int, tokens: torch.Tensor) -> torch.Tensor:
    """The noise of some tokens [n] int64 for one row -> [n] float32; for tests and inspection."""
    keys = _row_keys(torch.tensor([seed]), torch.tensor([position]))
    return _noise(keys.expand(2, tokens.shape[0]), tokens)


def _row_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The two keys of each row, [2, N] int32."""
    keys = []
    for start in (spec.KEY_START_FIRST, spec.KEY_START_SECOND):
        key = _mix(_low(seeds) + _signed(start))
        key = _mix(key ^ _low(seeds >> 32))
        key = _mix(key + _low(positions))
        keys.append(_mix(key ^ _low(positions >> 32)))
    return torch.stack(keys)


def _noise(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """keys [2, n] int32, tokens [n] int64 -> [n] float32."""
    return _noise_of(_uniform(keys, tokens))


def _uniform(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The specification's v: keys [2, n] or [2] int32, tokens [n] int64 -> [n] float32."""
    bits = _mix(_mix((tokens.int() * _signed(spec.TOKEN_STEP)).add_(keys[0])).bitwise_xor_(keys[1]))
    return _shift(bits, 1).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)


def _noise_of(v: torch.Tensor) -> torch.Tensor:
    mantissa, exponent = _split(1 - v)
    f = torch.where(exponent == 0, -v, mantissa - 1)
    exponential = _log_series(f, exponent).neg_()
    mantissa, exponent = _split(exponential)
    return _log_series(mantissa - 1, exponent).neg_()


def _signed(constant: int) -> int:
    return constant - (1 << 32) if constant >= 1 << 31 else constant


def _low(values: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of int64 values as int32."""
    low = values & 0xFFFFFFFF
    return torch.where(low >= 1 << 31, low - (1 << 32), low).int()


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int32, which PyTorch shifts arithmetically."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 16)).mul_(_signed(spec.MIX_FIRST))
    x.bitwise_xor_(_shift(x, 15)).mul_(_signed(spec.MIX_SECOND))
    return x.bitwise_xor_(_shift(x, 16))


def _split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x > 0, float32 -> mantissa in (sqrt(1/2), sqrt(2)] and exponent as float32."""
    bits = x.view(torch.int32)
    mantissa = ((bits & 0x007FFFFF) | 0x3F800000).view(torch.float32)
    large = mantissa > spec.SQRT2
    exponent = (bits >> 23).sub_(127).add_(large.int())
    return torch.where(large, mantissa * 0.5, mantissa), exponent.float()


def _log_series(f: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    z = f * f
    p = torch.full_like(f, spec.LOG1P_COEFFICIENTS[-1])
    for coefficient in reversed(spec.LOG1P_COEFFICIENTS[:-1]):
        p.mul_(f).add_(coefficient)
    y = (f * z).mul_(p)
    y.add_(exponent * spec.LN2_LOW)
    y.sub_(z.mul_(0.5))
    return y.add_(f).add_(exponent * spec.LN2_HIGH)
