"""Token ids that only the device knows yet."""

from __future__ import annotations

import torch


def pending_token(row: int) -> int:
    """What stands in a plan for the token that row `row` of the step before chose: a number that is no token id."""
    return -1 - row


@torch.inference_mode()
def fill_in(token_ids: torch.Tensor, chosen: torch.Tensor) -> None:
    """Replace what `pending_token` wrote. token_ids [T] int64, in place; chosen [S] int64, of the step before.

    Five small operations on the device, and none on the host.
    """
    rows = token_ids.bitwise_not().clamp_(min=0)  # ~x is -1 - x
    torch.where(token_ids < 0, chosen.index_select(0, rows), token_ids, out=token_ids)
