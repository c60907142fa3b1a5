"""Reads which layers of a decoder have experts, and how a token chooses among them."""

from __future__ import annotations

from dataclasses import dataclass

from engine.checkpoint.config_reader import ConfigReader
from engine.checkpoint.families import ExpertNames, SharedExpertNames


@dataclass(frozen=True, slots=True)
class GroupedSigmoid:
    """How a token chooses where experts are scored by a sigmoid and lie in groups of one size."""

    num_groups: int
    chosen_groups: int  # with the best sum of their two best scores
    scale: float  # of the weights of the chosen experts

    @classmethod
    def from_reader(cls, config: ConfigReader, num_experts: int, experts_per_token: int) -> GroupedSigmoid:
        """Read its keys, 1 where one is left out. Raises CheckpointError naming the key."""
        num_groups, chosen_groups = config.integer("n_group", default=1), config.integer("topk_group", default=1)
        group = num_experts // num_groups
        if num_experts % num_groups or group < 2:
            raise config.refuse("n_group", num_groups, f"a divisor of the {num_experts} experts, 2 or more in a group")
        if not -(-experts_per_token // group) <= chosen_groups <= num_groups:
            accepted = f"{-(-experts_per_token // group)} to n_group ({num_groups}), with {group} experts each"
            raise config.refuse("topk_group", chosen_groups, accepted)
        return cls(num_groups, chosen_groups, config.number("routed_scaling_factor", default=1.0))


@dataclass(frozen=True, slots=True)
class Clamp:
    """Of a SwiGLU: gate * sigmoid(alpha * gate) * (up + 1), of a gate of at most `limit` and an up within it."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Which layers have experts, and how a token chooses among them."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of one expert
    norm_topk_prob: bool  # whether the chosen experts' weights are scaled to sum to 1
    sparse_layers: frozenset[int]  # the layers with experts; the others have a dense MLP
    names: ExpertNames
    clamp: Clamp | None = None  # of biased experts
    shared_size: int = 0  # of the expert that every token goes through; 0: there is none
    grouped_sigmoid: GroupedSigmoid | None = None  # None: experts are scored by a softmax over all of them

    @property
    def shared(self) -> SharedExpertNames | None:
        """What the expert that every token goes through is called; None: there is none."""
        return self.names.shared if self.shared_size else None

    @classmethod
    def from_reader(cls, config: ConfigReader, names: ExpertNames, num_layers: int) -> MoeConfig:
        """Read the keys, with transformers' defaults. Raises CheckpointError naming the key."""
        num_experts = config.integer(config.first_of(*names.count_keys))
        experts_per_token = config.integer("num_experts_per_tok")
        if experts_per_token > num_experts:
            raise config.refuse("num_experts_per_tok", experts_per_token, f"at most num_experts ({num_experts})")
        dense = config.integers("mlp_only_layers")
        if any(layer >= num_layers for layer in dense):
            raise config.refuse("mlp_only_layers", dense, f"layers below num_hidden_layers ({num_layers})")
        step = config.integer("decoder_sparse_step", default=1)
        first = config.integer(names.first_key, default=1, minimum=0) if names.first_key else 0
        return cls(
            num_experts=num_experts,
            experts_per_token=experts_per_token,
            intermediate_size=config.integer(names.size_key),
            norm_topk_prob=names.renormalises == "always"
            or config.flag("norm_topk_prob", default=names.renormalises == "unless asked not to"),
            sparse_layers=frozenset(
                layer for layer in range(first, num_layers) if layer not in dense and (layer + 1) % step == 0
            ),
            names=names,
            clamp=Clamp(config.number("swiglu_alpha", default=1.702), config.number("swiglu_limit", default=7.0))
            if names.is_biased
            else None,
            shared_size=_shared_size(config, names.shared) if names.shared else 0,
            grouped_sigmoid=None
            if names.scoring == "softmax"
            else GroupedSigmoid.from_reader(config, num_experts, experts_per_token),
        )


def _shared_size(config: ConfigReader, names: SharedExpertNames) -> int:
    count = config.integer(names.count_key, default=1, minimum=0) if names.count_key else 1
    return count * config.integer(names.size_key, minimum=0)
