"""Tokens that a plan names by the row that chooses them."""

from __future__ import annotations

import torch

from engine.execution.batch import fill_in, pending_token


def test_each_place_gets_the_token_of_the_row_it_names_and_known_ones_stay() -> None:
    token_ids = torch.tensor([5, pending_token(2), 0, pending_token(0), pending_token(2)])
    fill_in(token_ids, torch.tensor([70, 71, 72]))
    assert token_ids.tolist() == [5, 72, 0, 70, 72]
