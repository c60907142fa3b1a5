"""Rotary position embedding: what config.json says of it, Llama 3's scaling, and the table of cosines and sines."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from engine.checkpoint.config_reader import ConfigReader

ROPE_TYPES = ("default", "llama3")
_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_SCALING_KEYS = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
KNOWN_KEYS = {"default": _KEYS, "llama3": _KEYS | _SCALING_KEYS}


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low rotary frequencies are divided by `factor`, high ones kept, those between blended (arXiv 2407.21783)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int  # tokens of context before scaling

    @classmethod
    def from_reader(cls, reader: ConfigReader, max_position_embeddings: int) -> Llama3Scaling:
        """Read the scaling's keys; `max_position_embeddings` stands in for the original one, as in transformers.

        Raises CheckpointError naming the key.
        """
        scaling = cls(
            factor=reader.number("factor"),
            low_freq_factor=reader.number("low_freq_factor"),
            high_freq_factor=reader.number("high_freq_factor"),
            original_max_position_embeddings=reader.integer(
                "original_max_position_embeddings", default=max_position_embeddings
            ),
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise reader.refuse(
                "high_freq_factor", scaling.high_freq_factor, f"above low_freq_factor ({scaling.low_freq_factor})"
            )
        return scaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: base wavelength and, for Llama 3, scaling."""

    theta: float
    scaling: Llama3Scaling | None

    @classmethod
    def from_reader(cls, config: ConfigReader, max_position_embeddings: int, default_theta: float) -> RopeConfig:
        """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).

        default_theta: the family's, for files that name none.

        Raises CheckpointError naming any key this engine has no use for: a scaling left out gives wrong text.
        """
        table = config.table(config.first_of("rope_parameters", "rope_scaling"))
        if table is None:
            table = ConfigReader({}, config.source)
        # A table without a type means the default form, as in transformers, which has no use for the context before.
        rope_type = table.choice(table.first_of("rope_type", "type"), ROPE_TYPES, default="default")
        if config.has("original_max_position_embeddings") and rope_type != "default":
            raise config.refuse(
                "original_max_position_embeddings",
                config.data["original_max_position_embeddings"],
                "this key inside rope_parameters or rope_scaling only",
            )
        for key in table.data:
            if key not in KNOWN_KEYS[rope_type] and table.has(key):
                accepted = ", ".join(sorted(KNOWN_KEYS[rope_type]))
                raise table.refuse(key, table.data[key], f"for rope_type {rope_type!r} only {accepted}")
        for reader in (config, table):
            if reader.number("partial_rotary_factor", default=1.0) != 1.0:
                raise reader.refuse("partial_rotary_factor", reader.data["partial_rotary_factor"], "1.0")
        theta = table.number("rope_theta", default=config.number("rope_theta", default=default_theta))
        scaling = None
        if rope_type == "llama3":
            scaling = Llama3Scaling.from_reader(table, max_position_embeddings)
        return cls(theta=theta, scaling=scaling)


def rope_cos_sin(rope: RopeConfig, head_dim: int, max_positions: int) -> torch.Tensor:
    """`[max_positions, head_dim]` float32: the cosines of the head_dim/2 frequencies, then their sines.

    Bit-equal with transformers: frequencies, angles and functions are all taken in float32, in its order.
    """
    frequencies = inverse_frequencies(rope, head_dim)
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = positions[:, None] * frequencies[None, :]
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def unrotated_cos_sin(head_dim: int, max_positions: int) -> torch.Tensor:
    """The table of a layer that has no positions: every angle is 0."""
    half = torch.ones((max_positions, head_dim // 2))
    return torch.cat((half, torch.zeros_like(half)), dim=-1)


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
