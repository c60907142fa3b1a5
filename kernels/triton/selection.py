"""The most likely token: the best of each block of the vocabulary, then the best of those."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.ordered_floats import ranked, token_of_rank
from kernels.triton.vocab_launch import argmax_launch, best_of_blocks_launch


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """See `Operations.argmax`. A NaN counts as the largest value, as in PyTorch."""
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    launch = argmax_launch(num_rows, vocab_size)
    num_blocks = triton.cdiv(vocab_size, launch.block)
    ranks = torch.empty(num_rows, num_blocks, dtype=torch.int64, device=logits.device)
    _argmax_kernel[(num_rows, num_blocks)](
        logits, ranks, vocab_size, logits.stride(0), BLOCK=launch.block, num_warps=launch.num_warps
    )
    return best_of_blocks(ranks)


def best_of_blocks(ranks: torch.Tensor) -> torch.Tensor:
    """ranks [N, num_blocks] int64, the best of each block by `ranked` -> token ids [N] int64."""
    num_rows, num_blocks = ranks.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=ranks.device)
    launch = best_of_blocks_launch(num_blocks)
    _best_of_blocks_kernel[(num_rows,)](ranks, tokens, num_blocks, BLOCK=launch.block, num_warps=launch.num_warps)
    return tokens


@triton.jit
def _argmax_kernel(
    logits_ptr,  # [N, V], float32
    ranks_ptr,  # [N, number of blocks], int64, output
    vocab_size,
    stride_logits_row,
    BLOCK: tl.constexpr,
):
    """Grid: (rows, blocks of the vocabulary)."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    # What lies past the vocabulary ranks below every token: -inf, and ids above all of theirs.
    values = tl.load(logits_ptr + row * stride_logits_row + tokens, mask=tokens < vocab_size, other=-float("inf"))
    tl.store(ranks_ptr + row * tl.num_programs(1) + block, tl.max(ranked(values, tokens)))


@triton.jit
def _best_of_blocks_kernel(
    ranks_ptr,  # [N, num_blocks], int64
    tokens_ptr,  # [N], int64, output
    num_blocks,
    BLOCK: tl.constexpr,
):
    """Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCK)
    ranks = tl.load(ranks_ptr + row * num_blocks + blocks, mask=blocks < num_blocks, other=-(2**63))
    tl.store(tokens_ptr + row, token_of_rank(tl.max(ranks)))
