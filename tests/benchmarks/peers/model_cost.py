"""How much arithmetic and how many bytes a token of a model needs."""

from __future__ import annotations

from dataclasses import dataclass

from engine.checkpoint.model_config import ModelConfig


@dataclass(frozen=True)
class Product:
    """A weight [n, k] of which a model has `count`, and of which a token passes through `used`."""

    n: int
    k: int
    count: int
    used: int

    @property
    def flop_per_token(self) -> int:
        """Through all that it uses."""
        return 2 * self.n * self.k * self.used


@dataclass(frozen=True)
class ModelCost:
    """The model's matrix products and attention; norms, activations and rotary are counted as free."""

    layers: tuple[Product, ...]  # of all layers
    head: Product
    attention_flop_per_pair: int  # of a query token and a key token, all layers: scores and weighted sum
    kv_elements_per_token: int  # all layers
    num_experts: int  # 0: dense
    experts_per_token: int

    @classmethod
    def of(cls, config: ModelConfig) -> ModelCost:
        """From the checkpoint's config."""
        layers, hidden, head_dim = config.num_layers, config.hidden_size, config.head_dim
        attended = config.num_heads * head_dim
        products = [
            Product(attended + 2 * config.num_kv_heads * head_dim, hidden, layers, layers),
            Product(hidden, attended, layers, layers),
        ]
        moe = config.moe
        if moe is None:
            width, count, used = config.intermediate_size, layers, layers
        else:
            width, count, used = moe.intermediate_size, layers * moe.num_experts, layers * moe.experts_per_token
            products.append(Product(moe.num_experts, hidden, layers, layers))
        products += [Product(2 * width, hidden, count, used), Product(hidden, width, count, used)]
        return cls(
            layers=tuple(products),
            head=Product(config.vocab_size, hidden, 1, 1),
            attention_flop_per_pair=4 * attended * layers,
            kv_elements_per_token=2 * config.num_kv_heads * head_dim * layers,
            num_experts=0 if moe is None else moe.num_experts,
            experts_per_token=0 if moe is None else moe.experts_per_token,
        )

    @property
    def layer_flop_per_token(self) -> int:
        """Products of all layers."""
        return sum(product.flop_per_token for product in self.layers)

    def weights_read(self, num_tokens: int) -> float:
        """Weights that a step over `num_tokens` tokens reads once, the head's included: of the experts, those that
        tokens choose when they choose evenly.
        """
        chosen = 1.0
        if self.num_experts:
            chosen -= (1 - self.experts_per_token / self.num_experts) ** num_tokens
        layers = sum(p.n * p.k * p.count * (chosen if p.count != p.used else 1.0) for p in self.layers)
        return layers + self.head.n * self.head.k
