"""Cosines and sines of every position, made once when a model is loaded."""

from __future__ import annotations

import math

import torch

from engine.checkpoint.llama3_scaling import Llama3Scaling
from engine.checkpoint.rope_config import RopeConfig


def rope_cos_sin(rope: RopeConfig, head_dim: int, max_positions: int) -> torch.Tensor:
    """`[max_positions, head_dim]` float32: the cosines of the head_dim/2 frequencies, then their sines.

    Bit-equal with transformers: frequencies, angles and functions are all taken in float32, in its order.
    """
    frequencies = inverse_frequencies(rope, head_dim)
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = positions[:, None] * frequencies[None, :]
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """`[head_dim / 2]` float32: radians a position, highest first."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies: torch.Tensor = 1.0 / (rope.theta**exponents)
    return frequencies if rope.scaling is None else _scale(frequencies, rope.scaling)


def _scale(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Llama 3.1's rule by wavelength: long ones divided by `factor`, short ones kept, a linear blend between."""
    context = scaling.original_max_position_embeddings
    longest_kept = context / scaling.high_freq_factor
    shortest_divided = context / scaling.low_freq_factor
    wavelengths = 2 * math.pi / frequencies
    divided = torch.where(wavelengths > shortest_divided, frequencies / scaling.factor, frequencies)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    share_kept = (context / wavelengths - scaling.low_freq_factor) / span
    blended = (1 - share_kept) * divided / scaling.factor + share_kept * divided
    in_between = ~(wavelengths < longest_kept) & ~(wavelengths > shortest_divided)
    return torch.where(in_between, blended, divided)
