"""Makes the workloads of the GPU benchmark, and computes the least time that they can take.

The least time is what the GPU's memory and arithmetic allow.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from engine.request import Request
from engine.sampling_params import SamplingParams
from tests.benchmarks.peers.floor import ModelCost

# Long prompts in a warm-up: the kernels have variants by length, and a run must meet none that the warm-up did not.
LONG_PROMPTS = 4

# An H200's as reached by a copy and a large product; its data sheet says 4.8e12 and 990e12.
H200_BYTES_PER_S = 4.3e12
H200_FLOP_PER_S = 790e12

FORMULA = """\
step     = max(W / bandwidth, 2 B P / matmul) + B C K / bandwidth
prefill  = max(W / bandwidth, FLOP / matmul); FLOP = 2 P_layers T + 2 P_head R + 4 L H D (pairs of a token and a key)
workload = prefill + its decode steps, every request running from the first; a shared prefix is computed once and read
           once a step
W: bytes of the weights that B tokens read, the head's included, of E experts the expected E (1 - (1 - k / E)^B);
P: weights a token passes through; C: mean context; K: bytes of KV a token, 2 L H_kv D times 2
bandwidth, matmul: the rates above (a copy's bytes read and written; a bfloat16 product's FLOP)"""


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
        """Tokens that all requests generate together."""
        return sum(self.max_tokens)

    @property
    def longest(self) -> int:
        """Tokens of the longest request at its end."""
        return max(len(prompt) + count for prompt, count in zip(self.prompts, self.max_tokens, strict=True))

    def requests(self, prefix: str = "") -> list[Request]:
        """The engine's requests; an id is `prefix` and a number."""
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
        """A workload to warm up with: the same lengths with other tokens, 8 generated each, and some prompts as long as
        any request becomes.
        """
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
    """Prompts that all begin with one prefix, greedy."""
    generator = random.Random("shared")
    prefix = _tokens(generator, sizes.shared_tokens, sizes.max_token_id)
    prompts = tuple(
        (*prefix, *_tokens(generator, sizes.own_tokens, sizes.max_token_id)) for _ in range(sizes.num_requests)
    )
    counts = (sizes.shared_max_tokens,) * sizes.num_requests
    return GpuWorkload("shared-prefix", prompts, counts, 0.0, sizes.shared_tokens)


def prefill_workload(sizes: GpuSizes, trial: int = 0) -> GpuWorkload:
    """Prompts of one length that share nothing and get one token each. Trials have other tokens."""
    generator = random.Random(f"prefill {trial}")
    count, length = sizes.prefill_prompts
    prompts = tuple(tuple(_tokens(generator, length, sizes.max_token_id)) for _ in range(count))
    return GpuWorkload("prefill", prompts, (1,) * count, 0.0)


def decode_workload(sizes: GpuSizes, batch: int) -> GpuWorkload:
    """Prompts of one length that share nothing, greedy, that do not end before they were measured."""
    generator = random.Random("decode")
    prompts = tuple(tuple(_tokens(generator, sizes.decode_prompt_tokens, sizes.max_token_id)) for _ in range(batch))
    # By the time the last are prefilled, the first have generated some tokens: one for each of the others at most.
    return GpuWorkload("decode", prompts, (sizes.decode_steps + batch + 64,) * batch, 0.0)


def _tokens(generator: random.Random, count: int, max_token_id: int) -> list[int]:
    return [generator.randint(0, max_token_id) for _ in range(count)]


@dataclass(frozen=True)
class GpuSizes:
    """How much each section runs. The goals hold for the defaults."""

    max_token_id: int = 10_000  # of prompts
    num_requests: int = 256
    nano_tokens: tuple[int, int] = (100, 1024)  # fewest and most, of inputs and of outputs
    shared_tokens: int = 2000
    own_tokens: int = 200
    shared_max_tokens: int = 100
    prefill_prompts: tuple[int, int] = (32, 1024)  # how many, of how many tokens
    # Decode: one batch after the other, the largest first; the next one goes on with some of its requests. At 64 the
    # context is then 1024 tokens on average.
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
        """Steps that a request of the last batch runs, at most."""
        return len(self.batches) * (self.warm_steps + 3 * self.timed_steps + self.profiled_steps)

    @classmethod
    def tiny(cls) -> GpuSizes:
        """Tiny counts, to try the script with."""
        return cls(
            max_token_id=250,
            num_requests=4,
            nano_tokens=(3, 8),
            shared_tokens=32,
            own_tokens=5,
            shared_max_tokens=3,
            prefill_prompts=(2, 20),
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


@dataclass(frozen=True)
class Limits:
    """The least times of one model, given a GPU's rates."""

    cost: ModelCost
    bytes_per_s: float = H200_BYTES_PER_S
    flop_per_s: float = H200_FLOP_PER_S
    itemsize: int = 2  # of weights and KV

    def weights_bytes(self, num_tokens: int) -> float:
        """Bytes of weights that a step over `num_tokens` tokens reads."""
        return self.cost.weights_read(num_tokens) * self.itemsize

    def kv_bytes(self, num_tokens: float) -> float:
        """Bytes of the KV of `num_tokens` tokens."""
        return self.cost.kv_elements_per_token * self.itemsize * num_tokens

    def decode_step_s(self, batch: int, kv_tokens: float) -> float:
        """Least time of a step that gives `batch` sequences a token each; `kv_tokens` is what they have together."""
        products = batch * (self.cost.layer_flop_per_token + self.cost.head.flop_per_token)
        weights_s = max(self.weights_bytes(batch) / self.bytes_per_s, products / self.flop_per_s)
        return weights_s + self.kv_bytes(kv_tokens) / self.bytes_per_s

    def prefill_s(self, own_tokens: Sequence[int], shared_tokens: int = 0) -> float:
        """Least time to the first tokens of prompts that share `shared_tokens` and then have `own_tokens` each."""
        num_tokens = shared_tokens + sum(own_tokens)
        pairs = _triangle(shared_tokens) + sum(own * shared_tokens + _triangle(own) for own in own_tokens)
        flop = (
            num_tokens * self.cost.layer_flop_per_token
            + len(own_tokens) * self.cost.head.flop_per_token
            + pairs * self.cost.attention_flop_per_pair
        )
        return max(self.weights_bytes(num_tokens) / self.bytes_per_s, flop / self.flop_per_s)

    def workload_s(self, load: GpuWorkload) -> float:
        """Least time of a whole workload."""
        own = [len(prompt) - load.shared_tokens for prompt in load.prompts]
        total_s = self.prefill_s(own, load.shared_tokens)
        for step in range(1, max(load.max_tokens)):
            running = [tokens for tokens, limit in zip(own, load.max_tokens, strict=True) if limit > step]
            kv_tokens = load.shared_tokens + sum(running) + step * len(running)
            total_s += self.decode_step_s(len(running), kv_tokens)
        return total_s


def _triangle(count: int) -> int:
    return count * (count + 1) // 2


class OutOfTime(Exception):
    """The time is up before everything was measured."""


class Deadline:
    """The moment after which nothing more is measured."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; negative once it has passed."""
        return self._end - time.monotonic()

    def check(self) -> None:
        """Raise OutOfTime if it has passed."""
        if self.left_s <= 0:
            raise OutOfTime(f"the {self.seconds:.0f} s are spent")
