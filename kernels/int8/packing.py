"""Rounds a weight to 8 bits as it is packed."""

from __future__ import annotations

import torch

from kernels import cpu
from kernels.operands import PackedWeight
from kernels.quantised import QuantisedWeight, WeightScheme, quantise

SCHEME = WeightScheme(bits=8, is_float=False, group_size=None, activations="int8_token")


def pack(weight: torch.Tensor | QuantisedWeight, *, keep_dtype: bool = False) -> PackedWeight:
    """See `Operations.pack`. Each output channel is rounded with the scale that makes its largest magnitude 127."""
    if keep_dtype or isinstance(weight, QuantisedWeight):
        return cpu.pack(weight, keep_dtype=keep_dtype)
    return cpu.pack(quantise(weight, SCHEME))
