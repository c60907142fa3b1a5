"""The prompts that both sides are given."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

VOCAB_SIZE = 32_768
NUM_RESERVED_IDS = 3  # the tokenizer's last ids are special tokens; a prompt holds none


@dataclass(frozen=True)
class Workload:
    """Requests of one length that arrive together: greedy, `max_tokens` each, the end of sequence ignored."""

    name: str
    model: str  # of MODELS in checkpoints.py
    num_groups: int  # 0: nothing shared
    prefix_tokens: int  # that the requests of a group begin with
    own_tokens: int
    num_requests: int = 64
    max_tokens: int = 64

    @property
    def prompt_tokens(self) -> int:
        """Of one request."""
        return self.prefix_tokens + self.own_tokens

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens to compute when each prefix is computed once."""
        return self.num_groups * self.prefix_tokens + self.num_requests * self.own_tokens

    def prompts(self, seed: int) -> list[list[int]]:
        """`num_requests` prompts in shuffled order. Other seeds share no prefix with these."""
        generator = random.Random(f"{self.name} {seed}")
        prefixes = [_tokens(generator, self.prefix_tokens) for _ in range(self.num_groups)] or [[]]
        prompts = [
            prefixes[number % len(prefixes)] + _tokens(generator, self.own_tokens)
            for number in range(self.num_requests)
        ]
        generator.shuffle(prompts)
        return prompts

    def sized(self, num_requests: int, max_tokens: int) -> Workload:
        """The same kind with other numbers."""
        return replace(self, num_requests=num_requests, max_tokens=max_tokens)


def _tokens(generator: random.Random, count: int) -> list[int]:
    return [generator.randrange(VOCAB_SIZE - NUM_RESERVED_IDS) for _ in range(count)]


WORKLOADS = {
    workload.name: workload
    for model in ("dense", "moe")
    for workload in (
        Workload(f"{model}-shared", model, num_groups=4, prefix_tokens=384, own_tokens=64),
        Workload(f"{model}-unshared", model, num_groups=0, prefix_tokens=0, own_tokens=448),
    )
}
