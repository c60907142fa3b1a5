"""What happens to logits before a token is drawn (penalties, top-k, top-p, min-p), and the most likely token."""

from __future__ import annotations

import numpy as np
import torch

# The largest value of each block of the vocabulary is found first, then the token in one block: 5 ms for 64 x 151,936
# on one thread, where PyTorch's argmax takes 18.
BLOCK_TOKENS = 256
LEAST_TOKENS = 16 * BLOCK_TOKENS  # below, finding the block costs what it saves

# Rows worked on together: 8 rows of a 151,936-token vocabulary are 5 MB, below what malloc returns to the system.
SLAB_ROWS = 8


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The index of each row's largest value, [N, V] -> [N]: of equals the first, and NaN counts as the largest."""
    num_rows, vocab_size = logits.shape
    num_blocks, rest = divmod(vocab_size, BLOCK_TOKENS)
    if vocab_size < LEAST_TOKENS or num_rows == 0:
        return logits.argmax(-1)
    blocks = logits[:, : num_blocks * BLOCK_TOKENS].view(num_rows, num_blocks, BLOCK_TOKENS)
    largest = blocks.amax(-1)
    if rest:
        largest = torch.cat([largest, logits[:, -rest:].amax(-1, keepdim=True)], dim=1)
    # A short last block is read with the end of the one before, which holds nothing as large: it would have been first.
    starts = (largest.argmax(-1, keepdim=True) * BLOCK_TOKENS).clamp_(max=vocab_size - BLOCK_TOKENS)
    tokens = starts + torch.arange(BLOCK_TOKENS)
    return (starts + logits.gather(1, tokens).argmax(-1, keepdim=True)).squeeze(1)


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """See `Operations.apply_penalties`. Touches nothing but the tokens that occurred."""
    values = logits[rows, token_ids]
    divisor = repetition.index_select(0, rows)
    values = torch.where(values < 0, values * divisor, values / divisor)
    values -= frequency.index_select(0, rows) * output_counts
    values -= presence.index_select(0, rows) * (output_counts > 0)
    logits.index_put_((rows, token_ids), values)


def mask_top_k_top_p_min_p(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> None:
    """In place: -inf for what `Truncation` drops of scores [N, V] float32. Rows with all three off are not touched."""
    active = ((top_k < logits.shape[1]) | (top_p < 1) | (min_p > 0)).nonzero().flatten()
    for start in range(0, active.shape[0], SLAB_ROWS):
        rows = active[start : start + SLAB_ROWS]
        slab = logits.index_select(0, rows)
        _mask_top_k(slab, top_k.index_select(0, rows))
        _mask_top_p(slab, top_p.index_select(0, rows))
        _mask_min_p(slab, min_p.index_select(0, rows))
        logits.index_copy_(0, rows, slab)


def _mask_top_k(slab: torch.Tensor, top_k: torch.Tensor) -> None:
    on = top_k < slab.shape[1]
    if not on.any():
        return
    largest_k = int(top_k[on].max())
    values = slab.topk(largest_k).values
    kth = values.gather(1, top_k.clamp(max=largest_k)[:, None] - 1)
    kth.masked_fill_(~on[:, None], -torch.inf)
    slab.masked_fill_(slab < kth, -torch.inf)  # tokens equal to the k-th stay, as in transformers


def _mask_top_p(slab: torch.Tensor, top_p: torch.Tensor) -> None:
    for row in (top_p < 1).nonzero().flatten().tolist():
        _mask_nucleus(slab[row], float(top_p[row]))


def _mask_nucleus(row: torch.Tensor, top_p: float) -> None:
    """row [V]. The mass is summed upwards in float32, as in transformers, so that an edge within rounding falls on the
    same side. Leaving out masked tokens changes no bit (240 rows of up to 151,936 tokens compared).

    Only values are sorted, by NumPy: 0.3 ms for 151,936, where torch.sort takes 10.7. Of equal tokens across the edge
    the lower ones stay, as with argmax; transformers' choice among them is arbitrary, because its sort is not stable.
    """
    values = row.numpy()
    is_present = values != -np.inf
    num_present = np.count_nonzero(is_present)
    if num_present == 0:
        return
    are_few = 2 * num_present < values.shape[0]  # as after top-k
    values = np.sort(values[is_present] if are_few else values)[-num_present:]
    mass = torch.from_numpy(values).softmax(-1).cumsum(-1).numpy()
    num_dropped = min(int(np.searchsorted(mass, np.float32(1 - top_p), side="right")), values.shape[0] - 1)
    edge = float(values[num_dropped])
    first, end = (int(np.searchsorted(values, values[num_dropped], side=side)) for side in ("left", "right"))
    row.masked_fill_(row < edge, -torch.inf)
    if first < num_dropped:
        row.index_fill_(0, (row == edge).nonzero().flatten()[end - num_dropped :], -torch.inf)


def _mask_min_p(slab: torch.Tensor, min_p: torch.Tensor) -> None:
    if not (min_p > 0).any():
        return
    probabilities = slab.softmax(-1)
    threshold = probabilities.amax(-1, keepdim=True) * min_p[:, None]
    slab.masked_fill_(probabilities < threshold, -torch.inf)
