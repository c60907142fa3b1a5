"""Comparison of a computed tensor with an expected one, strict enough to fail and saying where it did."""

from __future__ import annotations

import torch

# Allowed error of one element, in units of the dtype's rounding step `eps` times the larger of |expected| and the RMS
# of all of it (an element near zero is the difference of terms as large as its neighbours, so it carries their error).
# float32: both sides sum the same terms in different orders; sums of up to 10^4 terms differ by a few dozen eps.
# bfloat16, float16: sums are in float32, so what is left is rounding: half a step on each side, and the same again for
# an intermediate result that one side rounds (probabilities before P @ V, silu before its product) and one does not.
_MAX_STEPS = {torch.float32: 64.0, torch.bfloat16: 4.0, torch.float16: 4.0}
# Allowed RMS of the error in the same steps, relative to the RMS of `expected`. Random rounding of two values gives
# 0.4 steps; one step in every element is a bias, and a defect, even where each element alone would pass.
_RMS_STEPS = {torch.float32: 8.0, torch.bfloat16: 1.0, torch.float16: 1.0}


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, *, max_steps: float | None = None, rms_steps: float | None = None
) -> None:
    """Raise AssertionError unless shape, dtype, NaNs, infinities and values agree; integers must be equal.

    max_steps, rms_steps: other bounds than the dtype's, for a test that argues them.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(
            f"{tuple(actual.shape)} {actual.dtype} where {tuple(expected.shape)} {expected.dtype} was expected"
        )
    if actual.numel() == 0:
        return
    if not actual.dtype.is_floating_point:
        _raise_at(actual != expected, actual, expected, "differs")
        return
    _raise_at(actual.isnan() != expected.isnan(), actual, expected, "NaN on one side only")
    infinite = actual.isinf() | expected.isinf()
    _raise_at(infinite & (actual != expected), actual, expected, "infinity on one side only")
    finite = expected.isfinite()
    wide, error = expected.double(), (actual.double() - expected.double()).abs()
    wide, error = torch.where(finite, wide, 0.0), torch.where(finite, error, 0.0)
    num_finite = max(int(finite.sum()), 1)
    scale = float(wide.square().sum() / num_finite) ** 0.5
    rms_error = float(error.square().sum() / num_finite) ** 0.5
    eps = torch.finfo(expected.dtype).eps
    max_steps = _MAX_STEPS[expected.dtype] if max_steps is None else max_steps
    rms_steps = _RMS_STEPS[expected.dtype] if rms_steps is None else rms_steps
    summary = f"worst error {float(error.max()):.3g}, RMS error {rms_error:.3g}, RMS expected {scale:.3g}"
    _raise_at(error > max_steps * eps * wide.abs().clamp(min=scale), actual, expected, summary, worst_by=error)
    if rms_error > rms_steps * eps * scale:
        raise AssertionError(f"{summary}: RMS error above {rms_steps} steps of {eps:.3g}")


def _raise_at(
    wrong: torch.Tensor,
    actual: torch.Tensor,
    expected: torch.Tensor,
    message: str,
    worst_by: torch.Tensor | None = None,
) -> None:
    if not wrong.any():
        return
    weight = wrong.double() if worst_by is None else torch.where(wrong, worst_by, 0.0)
    index = tuple(int(i) for i in torch.unravel_index(weight.argmax(), wrong.shape))
    raise AssertionError(
        f"{message}; at {index}: {actual[index].item()!r} where {expected[index].item()!r} was expected "
        f"({int(wrong.sum())} of {wrong.numel()} elements)"
    )
