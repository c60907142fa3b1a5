from __future__ import annotations

import pytest
import torch

from kernels.cpu.dense import product_into
from kernels.deterministic.dense import TILE_ROWS, tile_heights
from kernels.interface import KernelsUnavailable

MODULE = "kernels.deterministic.dense.product_into"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_heights_found_give_the_bits_of_the_tile(dtype: torch.dtype) -> None:
    heights = tile_heights((96, 200), dtype, 0, torch.get_num_threads())
    assert TILE_ROWS in heights
    assert list(heights) == sorted(heights, reverse=True)
    generator = torch.Generator().manual_seed(7)
    x, weight = (torch.randn(rows, 200, generator=generator).to(dtype) for rows in (64, 96))

    def product(height: int) -> torch.Tensor:
        parts = [product_into(tile.clone(), weight, x.new_empty(height, 96)) for tile in torch.split(x, height)]
        return torch.cat(parts)

    for height in heights:
        assert torch.equal(product(height), product(TILE_ROWS))


def test_a_height_that_sums_in_another_order_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_order_below_16_rows(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        half = x.shape[1] // 2 if x.shape[0] < 16 else 0
        return out.copy_(x[:, :half] @ weight[:, :half].T).add_(x[:, half:] @ weight[:, half:].T)

    monkeypatch.setattr(MODULE, other_order_below_16_rows)
    assert not {4, 8} & set(tile_heights.__wrapped__((96, 200), torch.float32, 0, 1))


def test_a_product_that_depends_on_the_place_in_the_tile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def last_row_rounded_twice(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        product_into(x, weight, out)
        out[-1] = out[-1].bfloat16()
        return out

    monkeypatch.setattr(MODULE, last_row_rounded_twice)
    with pytest.raises(KernelsUnavailable, match=r"\(96, 200\).*depends on a row's place"):
        tile_heights.__wrapped__((96, 200), torch.float32, 0, 1)


def test_a_weight_off_the_alignment_is_probed_off_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()

    def recording(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        seen.add(weight.data_ptr() % 64)
        return product_into(x, weight, out)

    monkeypatch.setattr(MODULE, recording)
    tile_heights.__wrapped__((5, 7), torch.bfloat16, 34, 1)
    assert seen == {34}
