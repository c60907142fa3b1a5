from __future__ import annotations

import torch

from kernels.deterministic.key_blocks import KEY_BLOCK_TOKENS, KeyBlockPlan


def test_pairs_go_block_by_block_with_the_longest_rows_first() -> None:
    tables = torch.arange(1, 1 + 4 * 20, dtype=torch.int32).view(4, 20)
    plan = KeyBlockPlan.build(tables, (5, 300, 0, 129), block_size=16)
    assert plan.row_ids.tolist() == [1, 3, 0]
    assert plan.rows_with_block == (3, 2, 1)
    assert plan.places.tolist() == [0, 1, 2, 0, 1, 0]


def test_each_key_of_a_row_is_seen_once_and_nothing_else_is() -> None:
    tables = torch.randperm(200)[:30].int().view(2, 15) + 1
    kv_lens = (200, 17)
    plan = KeyBlockPlan.build(tables, kv_lens, block_size=16)
    for place, row in enumerate(plan.row_ids.tolist()):
        pairs = (plan.places == place).nonzero().flatten()
        seen = plan.slots[pairs][plan.mask[pairs][:, 0, 0] == 0].tolist()
        expected = [int(tables[row, index // 16]) * 16 + index % 16 for index in range(kv_lens[row])]
        assert seen == expected


def test_masked_keys_are_those_of_the_rows_first_token() -> None:
    plan = KeyBlockPlan.build(torch.tensor([[7, 9]], dtype=torch.int32), (20,), block_size=16)
    masked = plan.slots[plan.mask[:, 0, 0] == -torch.inf]
    assert masked.tolist() == [7 * 16] * (KEY_BLOCK_TOKENS - 20)


def test_no_keys_are_no_pairs() -> None:
    plan = KeyBlockPlan.build(torch.zeros(1, 1, dtype=torch.int32), (0,), block_size=16)
    assert plan.rows_with_block == ()
    assert plan.slots.shape == (0, KEY_BLOCK_TOKENS)
