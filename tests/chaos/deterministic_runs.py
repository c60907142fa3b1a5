"""The same requests in engines of different sizes, with every row of logits that was sampled from on record."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch

from engine.engine import Engine
from engine.request import Request
from engine.sampler import SamplingRow
from engine.sampling_params import SamplingParams
from tests.support.engines import load_engine, run_all, tokens_of

LONGEST_PROMPT = 300  # beyond two blocks of keys
MOST_TOKENS = 8

# From one request at a time to 64, chunks from 20 tokens to none at all, pools that preempt and a pool that never does,
# blocks of 8 tokens and of 16.
SIZES: tuple[Mapping[str, object], ...] = (
    {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "kv_cache.num_blocks": 2000},
    {"max_num_seqs": 20, "max_num_batched_tokens": 20, "kv_cache.num_blocks": 40, "kv_cache.block_size": 8},
    {"max_num_seqs": 32, "max_num_batched_tokens": 300, "kv_cache.num_blocks": 26, "prefix_cache.enabled": "off"},
    {"max_num_seqs": 3, "max_num_batched_tokens": 77, "kv_cache.num_blocks": 26, "unified_prefill": "off"},
    {"max_num_seqs": 1, "max_num_batched_tokens": 128, "kv_cache.num_blocks": 400, "moe.bucketed": "off"},
)


@dataclass(frozen=True)
class Run:
    """What one engine answered."""

    tokens: dict[str, list[int]]  # request -> its tokens
    logits: dict[str, dict[int, bytes]]  # request -> position -> digest of the row of logits
    num_preemptions: int
    cached_tokens: int


def make_requests(count: int, vocab_size: int) -> list[Request]:
    """Greedy and seeded in turn, of 1 to 300 tokens; half of the prompts begin with one of four prefixes.

    A request's seed is its number, so that a row of the sampler can be told apart by it.
    """
    rng = random.Random(4)
    prefixes = [[rng.randrange(vocab_size) for _ in range(length)] for length in (16, 70, 128, 200)]
    requests = []
    for number in range(count):
        prefix = rng.choice(prefixes) if number % 4 < 2 else []
        room = LONGEST_PROMPT - len(prefix)
        own = rng.randint(1, room) if rng.random() < 0.2 else rng.randint(1, min(40, room))
        params = SamplingParams(
            max_tokens=rng.randint(2, MOST_TOKENS),
            temperature=0.0 if number % 2 == 0 else 0.9,
            top_p=1.0 if number % 3 else 0.9,
            top_k=0 if number % 5 else 50,
            repetition_penalty=1.0 if number % 7 else 1.2,
            seed=number,
            ignore_eos=True,
        )
        requests.append(Request(f"r{number}", (*prefix, *(rng.randrange(vocab_size) for _ in range(own))), params))
    return requests


def run(path: Path, requests: Sequence[Request], settings: Mapping[str, object], *, shuffle: int) -> Run:
    """Run the requests in an order of the run's own. `settings`: of the engine, without the prefix."""
    engine = load_engine(path, {f"engine.{name}": value for name, value in settings.items()})
    try:
        logits = _record_logits(engine)
        order = list(requests)
        random.Random(shuffle).shuffle(order)
        outputs = run_all(engine, order)
        stats = engine.stats()
    finally:
        engine.close()
    tokens = {request_id: tokens_of(output) for request_id, output in outputs.items()}
    assert sum(map(len, logits.values())) == sum(map(len, tokens.values())), "each token has its row of logits"
    return Run(tokens, logits, stats.num_preemptions, stats.cached_tokens)


def differing(runs: Sequence[Run]) -> tuple[int, int]:
    """How many requests have other logits, and other tokens, in some run than in the first."""
    first, *others = runs
    logits = sum(any(other.logits[name] != first.logits[name] for other in others) for name in first.tokens)
    tokens = sum(any(other.tokens[name] != first.tokens[name] for other in others) for name in first.tokens)
    return logits, tokens


def _record_logits(engine: Engine) -> dict[str, dict[int, bytes]]:
    record: dict[str, dict[int, bytes]] = {}
    sample = engine._sampler.sample

    def recording(logits: torch.Tensor, rows: Sequence[SamplingRow | None]) -> object:
        for row, values in zip(rows, logits, strict=True):  # before the sampler edits them
            if row is None:  # a chunk: nothing is chosen yet
                continue
            digest = blake2b(values.numpy().tobytes(), digest_size=16).digest()
            positions = record.setdefault(f"r{row.params.seed}", {})
            assert row.position not in positions
            positions[row.position] = digest
        return sample(logits, rows)

    engine._sampler.sample = recording  # type: ignore[method-assign,assignment]  # a hook of this test alone
    return record
