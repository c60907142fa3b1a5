"""The sampling operations at the shapes of the supported models."""

from __future__ import annotations

import torch

from kernels.triton.gumbel import gumbel_argmax
from kernels.triton.sampling import apply_penalties, argmax
from kernels.triton.truncation import mask_top_k_top_p_min_p

VOCAB_SIZES = (151_936, 128_256)  # Qwen3 of every size, Llama 3
ROW_COUNTS = (1, 2, 64)  # narrow blocks, narrow blocks of a count not divisible by 16, wide blocks


def run_cases() -> None:
    """Launch every sampling kernel in every configuration that its launch function returns for these shapes."""
    for vocab_size in VOCAB_SIZES:
        for num_rows in ROW_COUNTS:
            _sample(num_rows, vocab_size)


def _sample(num_rows: int, vocab_size: int) -> None:
    logits = torch.empty(num_rows, vocab_size)
    ids = torch.empty(num_rows, dtype=torch.int64)
    number = torch.empty(num_rows)
    pairs = torch.empty(1000, dtype=torch.int64)
    argmax(logits)
    gumbel_argmax(logits, ids, ids)
    apply_penalties(logits, pairs, pairs, pairs.int(), number, number, number)
    mask_top_k_top_p_min_p(logits, ids, number, number)
