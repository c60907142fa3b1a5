"""Prompts that arrive together, each with the number of tokens it gets."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from engine.request import Request
from engine.sampling_params import SamplingParams
from tests.benchmarks.gpu.gpu_sizes import GpuSizes

# Of lengths of prompts that a run may meet and that a warm-up must have met: the kernels have variants by length.
LONG_PROMPTS = 4


@dataclass(frozen=True)
class GpuWorkload:
    """Requests that run to their max_tokens: the end of sequence is ignored."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]
    temperature: float
    shared_tokens: int = 0  # that all prompts begin with

    @property
    def output_tokens(self) -> int:
        """Of all requests."""
        return sum(self.max_tokens)

    @property
    def longest(self) -> int:
        """Tokens of the longest request at its end."""
        return max(len(prompt) + count for prompt, count in zip(self.prompts, self.max_tokens, strict=True))

    def requests(self, prefix: str = "") -> list[Request]:
        """For the engine; ids are the prefix and a number."""
        pairs = zip(self.prompts, self.max_tokens, strict=True)
        return [
            Request(
                f"{prefix}{number}",
                prompt,
                SamplingParams(max_tokens=count, temperature=self.temperature, ignore_eos=True),
            )
            for number, (prompt, count) in enumerate(pairs)
        ]

    def warm_up(self, max_token_id: int) -> GpuWorkload:
        """As many requests of the same lengths with other tokens, 8 generated each, and some as long as any becomes."""
        moved = tuple(tuple((token + 1) % (max_token_id + 1) for token in prompt) for prompt in self.prompts)
        generator = random.Random("long prompts")
        long = tuple(tuple(_tokens(generator, self.longest - 8, max_token_id)) for _ in range(LONG_PROMPTS))
        return replace(self, prompts=(*moved, *long), max_tokens=(8,) * (len(moved) + len(long)), shared_tokens=0)


def nano_vllm_workload(sizes: GpuSizes, trial: int = 0) -> GpuWorkload:
    """nano-vllm's bench.py: lengths of inputs and outputs uniform, seed 0, temperature 0.6.

    Trials have the same lengths; those after the first have other tokens, or they would find their prompts cached.
    """
    generator = random.Random(0)
    low, high = sizes.nano_tokens
    prompts = [_tokens(generator, generator.randint(low, high), sizes.max_token_id) for _ in range(sizes.num_requests)]
    counts = tuple(generator.randint(low, high) for _ in range(sizes.num_requests))
    moved = tuple(tuple((token + 37 * trial) % (sizes.max_token_id + 1) for token in prompt) for prompt in prompts)
    return GpuWorkload("nano-vllm", moved, counts, temperature=0.6)


def shared_prefix_workload(sizes: GpuSizes) -> GpuWorkload:
    """One prefix for all, greedy."""
    generator = random.Random("shared")
    prefix = _tokens(generator, sizes.shared_tokens, sizes.max_token_id)
    prompts = tuple(
        (*prefix, *_tokens(generator, sizes.own_tokens, sizes.max_token_id)) for _ in range(sizes.num_requests)
    )
    counts = (sizes.shared_max_tokens,) * sizes.num_requests
    return GpuWorkload("shared-prefix", prompts, counts, 0.0, sizes.shared_tokens)


def decode_workload(sizes: GpuSizes, batch: int) -> GpuWorkload:
    """Prompts of one length that share nothing, greedy, that do not end before they were measured."""
    generator = random.Random("decode")
    prompts = tuple(tuple(_tokens(generator, sizes.decode_prompt_tokens, sizes.max_token_id)) for _ in range(batch))
    # The first of them have generated some tokens by the time the last are prefilled: a step for each at most.
    return GpuWorkload("decode", prompts, (sizes.decode_steps + batch + 64,) * batch, 0.0)


def _tokens(generator: random.Random, count: int, max_token_id: int) -> list[int]:
    return [generator.randint(0, max_token_id) for _ in range(count)]
