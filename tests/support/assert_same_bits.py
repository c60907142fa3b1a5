"""Comparison that finds a rounding left out: too small for `assert_close`, too frequent for chance."""

from __future__ import annotations

import torch

# Sums in another order, and a reciprocal root good to 2 steps of float32, turn a rounding to 11 bits or fewer the
# other way in about one element of a thousand. A rounding left out changes one element of four.
_MAX_DIFFERENT = 0.02


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise AssertionError unless all but 2% of the elements are equal."""
    different = float((actual != expected).double().mean())
    if different > _MAX_DIFFERENT:
        raise AssertionError(f"{different:.1%} of {expected.numel()} elements differ; accepted: {_MAX_DIFFERENT:.0%}")
