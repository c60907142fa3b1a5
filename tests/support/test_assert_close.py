"""How tests compare tensors."""

from __future__ import annotations

import re

import pytest
import torch

from tests.support.tensors import assert_close


def test_equal_tensors_pass() -> None:
    x = torch.tensor([[1.0, torch.nan], [torch.inf, -3.0]])
    assert_close(x.clone(), x)
    assert_close(torch.empty(0, 3), torch.empty(0, 3))


def test_the_worst_element_is_named_with_its_coordinates() -> None:
    expected = torch.ones(3, 4)
    actual = expected.clone()
    actual[1, 2] = 1.001
    actual[2, 3] = 1.5
    with pytest.raises(AssertionError, match=re.escape("worst error 0.5, RMS error 0.144")) as failure:
        assert_close(actual, expected)
    assert "at (2, 3): 1.5 where 1.0 was expected (2 of 12 elements)" in str(failure.value)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_on_one_side_fails(value: float) -> None:
    expected = torch.ones(2, 2)
    actual = expected.clone()
    actual[0, 1] = value
    with pytest.raises(AssertionError, match=r"at \(0, 1\)"):
        assert_close(actual, expected)
    with pytest.raises(AssertionError, match=r"at \(0, 1\)"):
        assert_close(expected, actual)


def test_infinities_of_opposite_sign_fail() -> None:
    with pytest.raises(AssertionError, match="infinity on one side only"):
        assert_close(torch.tensor([torch.inf]), torch.tensor([-torch.inf]))


@pytest.mark.parametrize("actual", [torch.ones(4), torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(1, 2)])
def test_another_shape_or_dtype_fails(actual: torch.Tensor) -> None:
    with pytest.raises(AssertionError, match="was expected"):
        assert_close(actual, torch.ones(2, 2))


def test_integers_must_be_equal() -> None:
    with pytest.raises(AssertionError, match=r"at \(1,\): 3 where 2"):
        assert_close(torch.tensor([1, 3]), torch.tensor([1, 2]))


def test_a_small_bias_in_every_element_fails_though_each_alone_passes() -> None:
    expected = torch.linspace(1, 2, 1000).bfloat16()
    biased = (expected.float() * (1 + 1.6 * 2**-7)).bfloat16()
    one_off = expected.clone()
    one_off[3] = biased[3]
    assert_close(one_off, expected)
    with pytest.raises(AssertionError, match="RMS error above"):
        assert_close(biased, expected)
