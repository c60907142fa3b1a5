"""From a plan on the host to the tensors of a forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.execution.forward_batch import ForwardBatch
from engine.execution.forward_item import ForwardItem
from kernels.attention_rows import AttentionRows

Int64 = npt.NDArray[np.int64]


def build_forward_batch(items: Sequence[ForwardItem], block_size: int, device: torch.device) -> ForwardBatch:
    """Tensors for one forward pass over `items`, which must not be empty.

    Rows with one query go first, so that each attention kernel works on one contiguous run of tokens.
    """
    decode = [item for item in items if len(item.token_ids) == 1]
    prefill = [item for item in items if len(item.token_ids) > 1]
    token_ids = np.concatenate([np.asarray(item.token_ids, dtype=np.int64) for item in decode + prefill])
    positions = np.concatenate([_positions(item) for item in decode + prefill])
    slots = np.concatenate([_slots(item, block_size) for item in decode + prefill])
    last_token = np.cumsum([len(item.token_ids) for item in decode + prefill]) - 1
    row_of = {id(item): row for row, item in enumerate(decode + prefill)}
    wanted = [int(last_token[row_of[id(item)]]) for item in items if item.wants_logits]
    return ForwardBatch(
        token_ids=_to_device(token_ids, device),
        positions=_to_device(positions, device),
        slot_mapping=_to_device(slots, device),
        logits_indices=_to_device(np.asarray(wanted, dtype=np.int64), device),
        decode=_rows(decode, block_size, device) if decode else None,
        prefill=_rows(prefill, block_size, device) if prefill else None,
        num_decode_tokens=len(decode),
    )


def _positions(item: ForwardItem) -> Int64:
    return np.arange(item.start, item.start + len(item.token_ids), dtype=np.int64)


def _slots(item: ForwardItem, block_size: int) -> Int64:
    positions = _positions(item)
    first = item.start // block_size
    last = int(positions[-1]) // block_size
    blocks = np.asarray(item.block_table[first : last + 1], dtype=np.int64)
    return blocks[positions // block_size - first] * block_size + positions % block_size


def _rows(items: Sequence[ForwardItem], block_size: int, device: torch.device) -> AttentionRows:
    query_lens = tuple(len(item.token_ids) for item in items)
    kv_lens = tuple(item.start + len(item.token_ids) for item in items)
    num_blocks = [-(-kv_len // block_size) for kv_len in kv_lens]
    tables = np.zeros((len(items), max(num_blocks)), dtype=np.int32)  # 0 is the null block
    for row, (item, count) in enumerate(zip(items, num_blocks, strict=True)):
        tables[row, :count] = item.block_table[:count]
    cu_seqlens = np.zeros(len(items) + 1, dtype=np.int32)
    cu_seqlens[1:] = np.cumsum(query_lens)
    return AttentionRows(
        block_tables=_to_device(tables, device),
        cu_seqlens_q=_to_device(cu_seqlens, device),
        seq_lens=_to_device(np.asarray(kv_lens, dtype=np.int32), device),
        query_lens=query_lens,
        kv_lens=kv_lens,
    )


def _to_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)
