"""The rope scaling of Llama 3.1 and later."""

from __future__ import annotations

from dataclasses import dataclass

from engine.checkpoint.config_reader import ConfigReader


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
