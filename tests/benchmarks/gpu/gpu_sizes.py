"""How much is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class GpuSizes:
    """Counts of all sections; the defaults are those of the goals."""

    max_token_id: int = 10_000  # of prompts
    num_requests: int = 256
    nano_tokens: tuple[int, int] = (100, 1024)  # fewest and most, of inputs and of outputs
    shared_tokens: int = 2000
    own_tokens: int = 200
    shared_max_tokens: int = 100
    # Decode: the batches one after the other, the largest first, each of those requests of the one before that are
    # left. At 64 the context is then 1024 in the mean.
    batches: tuple[int, ...] = (256, 64, 16, 1)
    decode_prompt_tokens: int = 928
    warm_steps: int = 4
    timed_steps: int = 16  # of one time, three of which are taken: each has one step that takes a new KV block
    profiled_steps: int = 16
    parity_prompts: tuple[int, ...] = (1, 5, 16, 33, 120, 250)  # their lengths; two that share a prefix come on top
    parity_tokens: int = 24
    peer_s: float = 60.0  # the most it gets
    peer_blocks: int | None = None  # of its KV cache; None: it takes what memory there is
    engine: Mapping[str, object] = field(
        default_factory=lambda: {
            "engine.max_num_seqs": 256,
            "engine.max_num_batched_tokens": 8192,
            "engine.max_model_len": 4096,
        }
    )

    @property
    def decode_steps(self) -> int:
        """That a request of the last batch runs, at most."""
        return len(self.batches) * (self.warm_steps + 3 * self.timed_steps + self.profiled_steps)

    @classmethod
    def tiny(cls) -> GpuSizes:
        """To try the script with."""
        return cls(
            max_token_id=250,
            num_requests=4,
            nano_tokens=(3, 8),
            shared_tokens=32,
            own_tokens=5,
            shared_max_tokens=3,
            batches=(3, 1),
            decode_prompt_tokens=20,
            warm_steps=1,
            timed_steps=1,
            profiled_steps=1,
            parity_prompts=(1, 5),
            parity_tokens=4,
            peer_s=10.0,
            peer_blocks=40,
            engine={"engine.max_num_seqs": 8, "engine.num_threads": 1},
        )
