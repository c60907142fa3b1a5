"""A step that is run for what it leaves behind: compiled kernels, and the figure of what it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.execution.forward_item import ForwardItem


@dataclass(frozen=True, slots=True)
class WarmUpStep:
    """Rows of a step, and whether they share their prefixes."""

    rows: tuple[tuple[int, int], ...]  # (queries, tokens in KV after the step) of each; 1 query: a decode row
    shares_prefix: bool = False  # all full blocks before the rows' own queries are one group's

    def items(self, block_size: int, *, generates: bool) -> Sequence[ForwardItem]:
        """What to run over a KV cache of two blocks: every key of every row lies in block 1, whatever is there.

        generates: the model has a head, so logits are wanted; hidden states of all tokens of chunks are in any case.
        """
        return [
            ForwardItem(
                [0] * num_queries,
                num_tokens - num_queries,
                [1] * -(-num_tokens // block_size),
                wants_logits=generates,
                wants_hidden=num_queries > 1 or not generates,
            )
            for num_queries, num_tokens in self.rows
        ]
