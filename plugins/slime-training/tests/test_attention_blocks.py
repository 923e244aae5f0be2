"""Segments padded to rectangles: which go together, where their rows come from, and attention over them."""

import numpy as np
import pytest
import torch

from slime_training.attention_blocks import SHORT_SCORES, Rectangle, far_apart, padded_rows
from slime_training.attention_variants import variants_asked


def test_lengths_that_are_far_apart():
    assert not far_apart(1, 9)
    assert far_apart(1, 10)
    assert not far_apart(133, 100)
    assert far_apart(100, 134)


def test_the_last_row_fills_up():
    assert padded_rows(np.array([10, 20]), np.array([3, 1]), 4).tolist() == [10, 11, 12, 12, 20, 20, 20, 20]


@pytest.mark.parametrize("length", [5, 50])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_equals_a_loop(length, masked):
    assert (length * length > SHORT_SCORES) == (length == 50)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2 * length, heads, width, dtype=torch.float64, generator=generator)
        for heads, width in ((4, 8), (2, 8), (2, 6))
    )
    mask = torch.ones(length, length).tril().bool().expand(2, 1, -1, -1) if masked else None
    rectangle = Rectangle(num_segments=2, query_length=length, key_length=length)
    found = rectangle.attend(q, k, v, mask, 0.3)
    assert found.shape == (2 * length, 4, 6)
    for row in range(2 * length):
        seen = slice(row // length * length, row + 1)
        for head in range(4):
            weights = (k[seen, head // 2] @ q[row, head] * 0.3).softmax(0)
            torch.testing.assert_close(found[row, head], weights @ v[seen, head // 2])


def test_variants_that_are_asked_for():
    assert variants_asked({"softcap": None, "position_ids": 1}) == []
    assert variants_asked({"position_bias": 1, "softcap": 30.0}) == ["softcap", "position_bias"]
