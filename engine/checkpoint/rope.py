"""Rotary position embedding: what config.json says of it, the rules for longer contexts, and the table of cosines and
sines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from engine.checkpoint.config_reader import ConfigReader

ROPE_TYPES = ("default", "llama3", "linear", "yarn")
LONGROPE_CONTEXT = 4096  # tokens before scaling, where a file says nothing of it
_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
KNOWN_KEYS = {
    "default": _KEYS,
    "llama3": _KEYS | {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "linear": _KEYS | {"factor"},
    "yarn": _KEYS
    | {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
    | {"original_max_position_embeddings"},
    "longrope": _KEYS
    | {"factor", "attention_factor", "long_factor", "short_factor", "original_max_position_embeddings"},
}


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
class LinearScaling:
    """Every rotary frequency is divided by `factor` (arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Low frequencies are divided by `factor`, high ones kept, a ramp over dimensions between (arXiv 2309.00071)."""

    factor: float
    original_max_position_embeddings: int  # tokens of context before scaling
    attention_factor: float  # the table is multiplied by it
    beta_fast: float  # turns within the original context from which on a frequency is kept
    beta_slow: float  # and below which it is divided
    truncates: bool  # whether the ramp's ends are whole dimensions

    @classmethod
    def from_reader(cls, reader: ConfigReader, max_position_embeddings: int) -> YarnScaling:
        """Read its keys, with transformers' defaults; `max_position_embeddings` stands in for the original one.

        Raises CheckpointError naming the key.
        """
        factor = reader.number("factor")
        given = {key: reader.number(key) for key in ("mscale", "mscale_all_dim") if reader.has(key)}
        attention_factor = _mscale(factor)
        if len(given) == 2:
            attention_factor = _mscale(factor, given["mscale"]) / _mscale(factor, given["mscale_all_dim"])
        return cls(
            factor=factor,
            original_max_position_embeddings=reader.integer(
                "original_max_position_embeddings", default=max_position_embeddings
            ),
            attention_factor=reader.number("attention_factor", default=attention_factor),
            beta_fast=reader.number("beta_fast", default=32.0),
            beta_slow=reader.number("beta_slow", default=1.0),
            truncates=reader.flag("truncate", default=True),
        )

    @property
    def context_tokens(self) -> int:
        """The context that it stretches the original one to."""
        return round(self.factor * self.original_max_position_embeddings)


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Each rotary frequency is divided by a factor of its own (arXiv 2402.13753): one set for sequences up to the
    original context, one for longer ones.
    """

    short_factors: tuple[float, ...]  # one for each pair of dimensions that is rotated
    long_factors: tuple[float, ...]
    original_max_position_embeddings: int  # tokens of context before scaling
    attention_factor: float  # the table is multiplied by it

    @classmethod
    def from_reader(
        cls, config: ConfigReader, table: ConfigReader, max_position_embeddings: int, num_pairs: int
    ) -> LongRopeScaling:
        """Read its keys as transformers does for Phi-3: the context before scaling is beside the table.

        Raises CheckpointError naming the key.
        """
        short, long = (table.numbers(f"{name}_factor", count=num_pairs) for name in ("short", "long"))
        original = config.integer("original_max_position_embeddings", default=LONGROPE_CONTEXT)
        factor = table.number("factor", default=max_position_embeddings / original)
        by_context = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        return cls(short, long, original, table.number("attention_factor", default=by_context))


def _mscale(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


Scaling = Llama3Scaling | LinearScaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class RopeRules:
    """What a family makes of the keys, for files that name none, and what it knows."""

    default_theta: float = 10_000.0
    rope_types: tuple[str, ...] = ROPE_TYPES
    # `partial_rotary_factor` may be below 1. The loader then reorders the rows of queries and keys, with their bias and
    # the norms of a head; a norm over all heads would need it, too.
    may_be_partial: bool = False
    default_share: float = 1.0  # what a file without `partial_rotary_factor` means
    must_be_named: bool = False  # the type


DEFAULT_ROPE = RopeRules()


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: base wavelength, which dimensions it turns and, for longer contexts, scaling."""

    theta: float
    scaling: Scaling | None
    num_rotated: int  # the first dimensions of a head, in pairs (i, i + num_rotated / 2); the others stay

    @classmethod
    def from_reader(
        cls, config: ConfigReader, max_position_embeddings: int, rules: RopeRules, head_dim: int
    ) -> RopeConfig:
        """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).

        Raises CheckpointError naming any key this engine has no use for: a scaling left out gives wrong text.
        """
        table = config.table(config.first_of("rope_parameters", "rope_scaling"))
        if table is None:
            table = ConfigReader({}, config.source)
        # A table without a type means the default form, as in transformers, which has no use for the context before.
        rope_type = table.choice(
            table.first_of("rope_type", "type"), rules.rope_types, default=None if rules.must_be_named else "default"
        )
        if config.has("original_max_position_embeddings") and rope_type not in ("default", "longrope"):
            raise config.refuse(
                "original_max_position_embeddings",
                config.data["original_max_position_embeddings"],
                "this key inside rope_parameters or rope_scaling only",
            )
        for key in table.data:
            if key not in KNOWN_KEYS[rope_type] and table.has(key):
                accepted = ", ".join(sorted(KNOWN_KEYS[rope_type]))
                raise table.refuse(key, table.data[key], f"for rope_type {rope_type!r} only {accepted}")
        num_rotated = _num_rotated(config, table, rules, head_dim)
        theta = table.number("rope_theta", default=config.number("rope_theta", default=rules.default_theta))
        scaling: Scaling | None = None
        if rope_type == "llama3":
            scaling = Llama3Scaling.from_reader(table, max_position_embeddings)
        elif rope_type == "linear":
            scaling = LinearScaling(table.number("factor"))
        elif rope_type == "yarn":
            scaling = YarnScaling.from_reader(table, max_position_embeddings)
        elif rope_type == "longrope":
            scaling = LongRopeScaling.from_reader(config, table, max_position_embeddings, num_rotated // 2)
        return cls(theta=theta, scaling=scaling, num_rotated=num_rotated)

    def stretched(self, max_position_embeddings: int) -> int:
        """The longest sequence: as Qwen's cards say it, yarn is added to a file and its context left as it was."""
        stretched = self.scaling.context_tokens if isinstance(self.scaling, YarnScaling) else 0
        return max(max_position_embeddings, stretched)


def rope_readers(
    config: ConfigReader, rules: RopeRules, local_theta: float | None
) -> tuple[ConfigReader, ConfigReader | None]:
    """What `RopeConfig.from_reader` reads for layers that see everything, and for those with a window where these have
    a rope of their own. local_theta: as of `DecoderFamily`.

    In the form of transformers 5 both are in `rope_parameters`; before, `rope_scaling` is of the former alone, and
    `rope_local_base_freq` of the latter. Raises CheckpointError naming the key.
    """
    if local_theta is None:
        return config, None
    table = config.table("rope_parameters")
    kinds = ("full_attention", "sliding_attention")
    if table is not None and any(kind in table.data for kind in kinds):
        for key in table.data:
            if key not in kinds:
                raise table.refuse(key, table.data[key], f"only {', '.join(kinds)}")
        found = [table.table(kind) or ConfigReader({}, config.source) for kind in kinds]
    elif table is not None:
        raise config.refuse("rope_parameters", dict(table.data), f"one object each for {' and '.join(kinds)}")
    else:
        found = [config.table("rope_scaling") or ConfigReader({}, config.source), ConfigReader({}, config.source)]
    theta = config.number("rope_theta", default=rules.default_theta)
    local = config.number("rope_local_base_freq", default=local_theta or theta)
    name = "rope_scaling" if table is None else "rope_parameters"
    base = {key: value for key, value in config.data.items() if key != "rope_scaling"}
    full, windowed = (
        ConfigReader(base | {name: reader.data, "rope_theta": value}, config.source)
        for reader, value in zip(found, (theta, local), strict=True)
    )
    return full, windowed


def _num_rotated(config: ConfigReader, table: ConfigReader, rules: RopeRules, head_dim: int) -> int:
    readers = [reader for reader in (table, config) if reader.has("partial_rotary_factor")]
    shares = [reader.number("partial_rotary_factor") for reader in readers]
    for reader, share in zip(readers, shares, strict=True):
        accepted = f"{shares[0]} as in {readers[0].source}" if rules.may_be_partial else "1.0"
        if share != (shares[0] if rules.may_be_partial else 1.0):
            raise reader.refuse("partial_rotary_factor", share, accepted)
    share = shares[0] if shares else rules.default_share
    num_rotated = int(head_dim * share)
    if num_rotated % 2 or not 0 < num_rotated <= head_dim:
        raise (readers or [config])[0].refuse(
            "partial_rotary_factor", share, f"a share of head_dim ({head_dim}) that is an even number of dimensions"
        )
    return num_rotated


def rope_cos_sin(rope: RopeConfig, head_dim: int, max_positions: int) -> torch.Tensor:
    """`[max_positions, head_dim]` float32: the cosines of the head_dim/2 frequencies, then their sines.

    Bit-equal with transformers: frequencies, angles and functions are all taken in float32, in its order. Pairs behind
    those that are rotated, in the order of `paired_dimensions`, have the angle 0.
    """
    frequencies = inverse_frequencies(rope, max_positions)
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = positions[:, None] * frequencies[None, :]
    factor = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling | LongRopeScaling) else 1.0
    num_kept = (head_dim - rope.num_rotated) // 2
    kept = unrotated_cos_sin(2 * num_kept, max_positions)
    halves = zip((angles.cos(), angles.sin()), kept.chunk(2, dim=-1), strict=True)
    return torch.cat([torch.cat((turned * factor, rest), dim=-1) for turned, rest in halves], dim=-1)


def paired_dimensions(rope: RopeConfig, head_dim: int) -> torch.Tensor | None:
    """[head_dim] int64: a head's dimensions in an order in which i and i + head_dim / 2 are turned together; None where
    they are so in the file. Products of queries and keys do not depend on the order.
    """
    half = rope.num_rotated // 2
    if half == head_dim // 2:
        return None
    dims = torch.arange(head_dim)
    first, second, rest = dims[:half], dims[half : 2 * half], dims[2 * half :]
    num_kept = head_dim // 2 - half
    return torch.cat((first, rest[:num_kept], second, rest[num_kept:]))


def unrotated_cos_sin(head_dim: int, max_positions: int) -> torch.Tensor:
    """`rope_cos_sin` of a layer that has no positions, `[max_positions, head_dim]` float32: every angle is 0."""
    half = torch.ones((max_positions, head_dim // 2))
    return torch.cat((half, torch.zeros_like(half)), dim=-1)


def inverse_frequencies(rope: RopeConfig, max_positions: int) -> torch.Tensor:
    """`[num_rotated / 2]` float32: radians a position, highest first. max_positions: of the longest sequence."""
    exponents = torch.arange(0, rope.num_rotated, 2, dtype=torch.float32) / rope.num_rotated
    wavelengths: torch.Tensor = rope.theta**exponents  # over 2 pi
    scaling = rope.scaling
    if isinstance(scaling, LongRopeScaling):
        is_long = max_positions > scaling.original_max_position_embeddings
        return 1.0 / (torch.tensor(scaling.long_factors if is_long else scaling.short_factors) * wavelengths)
    frequencies = 1.0 / wavelengths
    if isinstance(scaling, Llama3Scaling):
        return _scale_by_wavelength(frequencies, scaling)
    if isinstance(scaling, YarnScaling):
        return _scale_by_dimension(wavelengths, scaling, rope.theta)
    return frequencies if scaling is None else frequencies / scaling.factor


def _scale_by_dimension(wavelengths: torch.Tensor, scaling: YarnScaling, theta: float) -> torch.Tensor:
    """Yarn's rule: kept below one dimension, divided above another, a linear ramp between."""
    num_pairs = wavelengths.shape[0]

    def dimension(num_turns: float) -> float:
        """The pair that turns so many times within the original context."""
        turns = scaling.original_max_position_embeddings / (num_turns * 2 * math.pi)
        return (2 * num_pairs * math.log(turns)) / (2 * math.log(theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncates:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    if first == last:
        last += 0.001  # as transformers does; else a division by 0
    share_divided = ((torch.arange(num_pairs, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    share_kept = 1 - share_divided
    divided = 1.0 / (scaling.factor * wavelengths)
    return divided * (1 - share_kept) + 1.0 / wavelengths * share_kept


def _scale_by_wavelength(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
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
