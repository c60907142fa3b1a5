"""The sizes of the models that are measured."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """What the operations of one model see. Names as in `kernels.interface`."""

    name: str
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int  # of one expert where there are experts
    vocab_size: int
    head_dim: int = 128
    num_experts: int = 0  # 0: dense
    experts_per_token: int = 0
    qk_norm: bool = True

    @property
    def qkv_width(self) -> int:
        """Width of queries, keys and values together."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


MODELS = (
    ModelShape("Qwen3-0.6B", 1024, 16, 8, 3072, 151936),
    ModelShape("Qwen3-8B", 4096, 32, 8, 12288, 151936),
    ModelShape("Qwen3-30B-A3B", 2048, 32, 4, 768, 151936, num_experts=128, experts_per_token=8),
    ModelShape("Llama-3-8B", 4096, 32, 8, 14336, 128256, qk_norm=False),
)


def distinct(models: Iterable[ModelShape], key: Callable[[ModelShape], Hashable]) -> Iterator[tuple[str, ModelShape]]:
    """One model of those that look the same to an operation, under the names of all of them."""
    groups: dict[Hashable, list[ModelShape]] = {}
    for model in models:
        groups.setdefault(key(model), []).append(model)
    for alike in groups.values():
        yield ", ".join(model.name for model in alike), alike[0]
