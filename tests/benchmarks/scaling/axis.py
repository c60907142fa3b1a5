"""What grows from point to point."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.benchmarks.peers.workload import Workload


@dataclass(frozen=True)
class Axis:
    """Workloads that differ in one number."""

    name: str
    sizes: tuple[int, ...]
    workload: Callable[[int], Workload]


def _unshared(num_requests: int, prompt_tokens: int, max_tokens: int) -> Workload:
    name = f"{num_requests} requests of {prompt_tokens} + {max_tokens} tokens"
    return Workload(name, "small", 0, 0, prompt_tokens, num_requests, max_tokens)


# Every token is computed: nothing is shared. 283,000 tokens a round.
AXES = (
    Axis("requests", (16, 64, 256, 1024), lambda size: _unshared(size, 64, 16)),
    Axis("prompt tokens", (128, 256, 512, 1024, 2048, 4096), lambda size: _unshared(16, size, 8)),
    Axis("output tokens", (16, 32, 64, 128, 256, 512), lambda size: _unshared(32, 64, size)),
)
