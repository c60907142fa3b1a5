"""How positions become rotary angles."""

from __future__ import annotations

from dataclasses import dataclass

from engine.checkpoint.config_reader import ConfigReader
from engine.checkpoint.llama3_scaling import Llama3Scaling

DEFAULT_THETA = 10_000.0  # transformers' value for files that name none (Llama 2)
ROPE_TYPES = ("default", "llama3")
KNOWN_KEYS = {
    "default": {"rope_type", "type", "rope_theta", "partial_rotary_factor"},
    "llama3": {
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: base wavelength and, for Llama 3, scaling."""

    theta: float
    scaling: Llama3Scaling | None

    @classmethod
    def from_reader(cls, config: ConfigReader, max_position_embeddings: int) -> RopeConfig:
        """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).

        Raises CheckpointError naming any key this engine has no use for: a scaling left out gives wrong text.
        """
        table = config.table(config.first_of("rope_parameters", "rope_scaling"))
        if config.has("original_max_position_embeddings"):
            raise config.refuse(
                "original_max_position_embeddings",
                config.data["original_max_position_embeddings"],
                "this key inside rope_parameters or rope_scaling only",
            )
        if table is None:
            table = ConfigReader({}, config.source)
        # Nothing but the default form is meant by a table without a type, as in transformers.
        rope_type = table.choice(table.first_of("rope_type", "type"), ROPE_TYPES, default="default")
        for key in table.data:
            if key not in KNOWN_KEYS[rope_type] and table.has(key):
                accepted = ", ".join(sorted(KNOWN_KEYS[rope_type]))
                raise table.refuse(key, table.data[key], f"for rope_type {rope_type!r} only {accepted}")
        for reader in (config, table):
            if reader.number("partial_rotary_factor", default=1.0) != 1.0:
                raise reader.refuse("partial_rotary_factor", reader.data["partial_rotary_factor"], "1.0")
        theta = table.number("rope_theta", default=config.number("rope_theta", default=DEFAULT_THETA))
        scaling = None
        if rope_type == "llama3":
            scaling = Llama3Scaling.from_reader(table, max_position_embeddings)
        return cls(theta=theta, scaling=scaling)
