"""What grows from point to point."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.benchmarks.peers.workload import Workload

OWN_TOKENS = "own prompt tokens"  # the others of 512 are the same in all requests


@dataclass(frozen=True)
class Axis:
    """Workloads that differ in one number."""

    name: str
    sizes: tuple[int, ...]
    workload: Callable[[int], Workload]


def _unshared(num_requests: int, prompt_tokens: int, max_tokens: int) -> Workload:
    name = f"{num_requests} requests of {prompt_tokens} + {max_tokens} tokens"
    return Workload(name, "small", 0, 0, prompt_tokens, num_requests, max_tokens)


def _one_prefix(own_tokens: int) -> Workload:
    name = f"64 requests of 512 + 16 tokens, {own_tokens} of the prompt its own"
    return Workload(name, "small", 1, 512 - own_tokens, own_tokens, 64, 16)


# All but the last share nothing: 283,000 tokens a round. Of the last 203,000, of which 73,000 are computed.
AXES = (
    Axis("requests", (16, 64, 256, 1024), lambda size: _unshared(size, 64, 16)),
    Axis("prompt tokens", (128, 256, 512, 1024, 2048, 4096), lambda size: _unshared(16, size, 8)),
    Axis("output tokens", (16, 32, 64, 128, 256, 512), lambda size: _unshared(32, 64, size)),
    Axis(OWN_TOKENS, (16, 32, 64, 128, 256, 512), _one_prefix),
)
