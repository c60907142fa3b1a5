"""Which steps to run before the first job: the largest, and one of each kind that compiles kernels of its own."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence

from engine.loading.warm_up_step import WarmUpStep
from settings import EngineSettings

# Nothing that decides about kernels changes beyond: the last bound is 128 rows an expert, 8,192 tokens of 512 experts
# with 8 choices.
MOST_CLASSIFIED_TOKENS = 16_384


def largest_steps(settings: EngineSettings, max_model_len: int) -> Sequence[WarmUpStep]:
    """The steps that take the most memory, whichever of them that is.

    Decode rows alone, at full length, which decides how many parts attention keeps; chunks alone, as few as can be,
    with the hidden states of all their tokens; and both, with logits of as many sequences as can run.
    """
    max_seqs, max_tokens = settings.max_num_seqs, settings.max_num_batched_tokens
    decode = [(1, max_model_len)] * max_seqs
    chunks = _chunks(max_tokens, max_seqs, max_model_len)
    mixed_chunks = _chunks(max_tokens - max_seqs + 1, 1, max_model_len)
    mixed = [*decode[1:], *mixed_chunks]
    return [WarmUpStep(tuple(rows)) for rows in (mixed, chunks, decode)]


def compiling_steps(
    settings: EngineSettings, max_model_len: int, launch_class: Callable[[int], Hashable]
) -> Sequence[WarmUpStep]:
    """A step for each kind that leads to kernels not compiled before. launch_class: what a step's number of tokens
    decides about them.

    Decode rows have their keys in one piece (a row of two tokens is never split) or in parts (one row of full length
    is, if any is); rows in groups have kernels for 16, 64 and 128 pairs of a query and a head, so groups double.
    """
    max_seqs = settings.max_num_seqs
    steps = [WarmUpStep(((1, min(2, max_model_len)),)), WarmUpStep(((1, max_model_len),))]
    for num_tokens in first_of_each(launch_class, settings.max_num_batched_tokens):
        steps.append(WarmUpStep(tuple(_chunks(num_tokens, max_seqs, max_model_len))))
    if settings.shared_prefix.enabled:
        steps += _shared_prefix_steps(settings, max_model_len)
    return steps


def first_of_each(launch_class: Callable[[int], Hashable], max_tokens: int) -> Sequence[int]:
    """The smallest number of tokens of each class, rising."""
    firsts: dict[Hashable, int] = {}
    for num_tokens in range(1, min(max_tokens, MOST_CLASSIFIED_TOKENS) + 1):
        firsts.setdefault(launch_class(num_tokens), num_tokens)
    return sorted(firsts.values())


def _chunks(num_tokens: int, max_rows: int, max_model_len: int) -> list[tuple[int, int]]:
    """As few chunks as hold num_tokens, the sequence of each at its full length behind it; fewer tokens where max_rows
    do not hold them.
    """
    full, rest = divmod(num_tokens, max_model_len)
    queries = [max_model_len] * full + [rest] * (rest > 0)
    return [(count, max_model_len) for count in queries[:max_rows]]


def _shared_prefix_steps(settings: EngineSettings, max_model_len: int) -> Iterator[WarmUpStep]:
    """Groups of 2, 4, 8 and on of decode rows, and of chunks of two and of many tokens, behind all the blocks that
    can be shared."""
    max_seqs, max_tokens = settings.max_num_seqs, settings.max_num_batched_tokens
    num_rows = 2
    while num_rows <= max_seqs:
        for num_queries in dict.fromkeys((1, 2, min(max_tokens // num_rows, max_model_len // 2))):
            if (
                0 < num_queries <= max_tokens // num_rows
                and max_model_len - num_queries >= settings.kv_cache.block_size
            ):
                yield WarmUpStep(((num_queries, max_model_len),) * num_rows, shares_prefix=True)
        num_rows *= 2
