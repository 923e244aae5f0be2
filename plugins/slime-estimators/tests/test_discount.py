"""Discounted sums against a loop over each sample's tokens, from the last to the first."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from slime_estimators.discount import discounted_sums


def loop(
    values: npt.NDArray[np.float64], lengths: list[int], mask: npt.NDArray[np.bool_], decay: float
) -> npt.NDArray[np.float64]:
    result = np.zeros(len(values))
    end = 0
    for length in lengths:
        end += length
        carry = 0.0
        for token in reversed(range(end - length, end)):
            if mask[token]:
                carry = float(values[token]) + decay * carry
                result[token] = carry
    return result


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95, 1.0, 1.5])
@pytest.mark.parametrize("lengths", [[5, 0, 3, 7, 7, 1], [0, 0], [1], [], [4, 0, 0, 90, 2]])
def test_equals_a_loop_over_the_tokens(lengths: list[int], decay: float) -> None:
    draw = np.random.default_rng(len(lengths))
    values = draw.normal(size=sum(lengths))
    for mask in (np.ones(len(values), bool), draw.random(len(values)) < 0.5, np.zeros(len(values), bool)):
        found = discounted_sums(values, np.array(lengths, np.int32), mask, decay)
        np.testing.assert_allclose(found, loop(values, lengths, mask, decay), rtol=1e-12, atol=1e-12)


def test_a_gap_costs_no_discount_and_its_values_go_nowhere() -> None:
    values = np.array([1.0, np.nan, np.inf, 4.0, 8.0])
    found = discounted_sums(values, np.array([4, 1]), np.array([1, 0, 0, 1, 1], np.uint8), 0.5)
    assert found.tolist() == [3.0, 0.0, 0.0, 4.0, 8.0]


def test_it_is_done_in_float64() -> None:
    values = np.array([1e-9, 1.0], np.float32)
    found = discounted_sums(values, np.array([2]), np.ones(2, bool), 1.0)
    assert found.dtype == np.float64
    assert found[0] - 1.0 == pytest.approx(1e-9, rel=1e-5)
