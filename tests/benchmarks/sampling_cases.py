"""Benchmark cases of choosing tokens: penalties, truncation, and the best token with noise and without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kernels.interface import Operations
from kernels.operands import Truncation
from tests.benchmarks.kernel_inputs import (
    Case,
    ModelShape,
    Prepare,
    Sizes,
    Workload,
    copy_back,
    distinct,
    random,
    shuffled,
)

LOGIT_SCALE = 3.0  # a nucleus of some thousand tokens


def sampling_cases(ops: Operations, models: Sequence[ModelShape], sizes: Sizes) -> Iterator[Case]:
    """A decode step's rows over the vocabularies."""
    rows = sizes.few_tokens
    for names, model in distinct(models, lambda m: m.vocab_size):
        vocab = model.vocab_size
        shape = f"{rows} x {vocab}"
        for what, temperature, truncation in (
            ("greedy", 0.0, None),
            ("drawn", 1.0, None),
            ("drawn, top-k 50", 1.0, (min(50, vocab), 1.0, 0.0)),
            ("drawn, top-p 0.9", 1.0, (vocab, 0.9, 0.0)),
            ("drawn, top-k 20, top-p 0.95", 0.6, (min(20, vocab), 0.95, 0.0)),
            ("drawn, min-p 0.05", 1.0, (vocab, 1.0, 0.05)),
        ):
            prepare = _choose(ops, (rows, vocab), temperature, truncation)
            yield Case("choose_tokens", names, f"{shape}, {what}", "bandwidth", prepare)
        num_tokens = min(sizes.penalised_tokens, vocab)
        penalties = _penalties(ops, rows, vocab, num_tokens)
        yield Case("apply_penalties", names, f"{shape}, {num_tokens} tokens a row", "bandwidth", penalties)


def _logits(rows: int, vocab: int, device: torch.device) -> torch.Tensor:
    return random(rows, vocab, device=device, dtype=torch.float32).mul_(LOGIT_SCALE)


def _choose(
    ops: Operations, shape: tuple[int, int], temperature: float, limits: tuple[int, float, float] | None
) -> Prepare:
    def prepare(device: torch.device) -> Workload:
        rows, vocab = shape
        logits = _logits(rows, vocab, device).bfloat16()
        original = logits.clone()
        is_known = torch.ones(vocab, dtype=torch.bool, device=device)
        temperatures = torch.full((rows,), temperature, device=device)
        seeds, positions = (shuffled(rows, device) for _ in range(2))
        truncation = None if limits is None else Truncation(*_columns(rows, limits, device))
        libraries = {
            "torch argmax": lambda: logits.argmax(dim=-1),
            "torch softmax, multinomial": lambda: logits.float().softmax(dim=-1).multinomial(1).squeeze(1),
        }
        library = "torch softmax, multinomial" if temperature else "torch argmax"
        reads = 2 if temperature else 1
        return Workload(
            reads * 2 * rows * vocab,
            f"{reads} x 2 N V bytes: logits of 2 bytes, read for the best, and again for a draw",
            lambda: ops.choose_tokens(logits, is_known, temperatures, seeds, positions, truncation)[0],
            {library: libraries[library]} if limits is None else {},
            restore=lambda: copy_back(logits, original),
        )

    return prepare


def _columns(rows: int, limits: tuple[int, float, float], device: torch.device) -> tuple[torch.Tensor, ...]:
    top_k = torch.full((rows,), limits[0], dtype=torch.int64, device=device)
    return top_k, *(torch.full((rows,), limit, device=device) for limit in limits[1:])


def _penalties(ops: Operations, rows: int, vocab: int, num_tokens: int) -> Prepare:
    def prepare(device: torch.device) -> Workload:
        logits = _logits(rows, vocab, device)
        original = logits.clone()
        row_ids = torch.arange(rows, device=device).repeat_interleave(num_tokens)
        token_ids = torch.cat([shuffled(vocab, device)[:num_tokens] for _ in range(rows)])
        counts = (token_ids % 3).int()
        repetition, presence, frequency = (torch.full((rows,), x, device=device) for x in (1.1, 0.2, 0.3))

        def run() -> torch.Tensor:
            ops.apply_penalties(logits, row_ids, token_ids, counts, repetition, presence, frequency)
            return logits

        def by_torch() -> torch.Tensor:
            found, penalty = logits[row_ids, token_ids], repetition[row_ids]
            found = torch.where(found < 0, found * penalty, found / penalty)
            found -= frequency[row_ids] * counts + presence[row_ids] * (counts > 0)
            logits[row_ids, token_ids] = found
            return logits

        return Workload(
            row_ids.numel() * (8 + 8 + 4 + 2 * 32),
            "M (20 + 2 x 32) bytes: of a logit that lies alone the memory moves a sector of 32 bytes",
            run,
            {"torch index, where, index_put": by_torch},
            restore=lambda: copy_back(logits, original),
        )

    return prepare
