"""Reads which layers of a decoder have experts, and how a token chooses among them."""

from __future__ import annotations

from dataclasses import dataclass

from engine.checkpoint.config_reader import ConfigReader
from engine.checkpoint.families import ExpertNames, SharedExpertNames


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Which layers have experts, and how a token chooses among them."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of one expert
    norm_topk_prob: bool  # whether the chosen experts' weights are scaled to sum to 1
    sparse_layers: frozenset[int]  # the layers with experts; the others have a dense MLP
    names: ExpertNames
    shared_size: int = 0  # of the expert that every token goes through; 0: there is none

    @property
    def shared(self) -> SharedExpertNames | None:
        """What the expert that every token goes through is called; None: there is none."""
        return self.names.shared if self.shared_size else None

    @classmethod
    def from_reader(cls, config: ConfigReader, names: ExpertNames, num_layers: int) -> MoeConfig:
        """Read the keys, with transformers' defaults. Raises CheckpointError naming the key."""
        num_experts = config.integer(config.first_of("num_local_experts", "num_experts"))
        experts_per_token = config.integer("num_experts_per_tok")
        if experts_per_token > num_experts:
            raise config.refuse("num_experts_per_tok", experts_per_token, f"at most num_experts ({num_experts})")
        dense = config.integers("mlp_only_layers")
        if any(layer >= num_layers for layer in dense):
            raise config.refuse("mlp_only_layers", dense, f"layers below num_hidden_layers ({num_layers})")
        step = config.integer("decoder_sparse_step", default=1)
        return cls(
            num_experts=num_experts,
            experts_per_token=experts_per_token,
            intermediate_size=config.integer(names.size_key),
            norm_topk_prob=names.always_renormalises or config.flag("norm_topk_prob", default=False),
            sparse_layers=frozenset(
                layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0
            ),
            names=names,
            shared_size=config.integer(names.shared.size_key, minimum=0) if names.shared else 0,
        )
