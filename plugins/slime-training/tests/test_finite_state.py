"""Weights and moments that are not finite are found and named, whatever their dtype and place in a tensor."""

import math

import pytest
import torch

from slime_training.finite_state import StateTensor, all_finite, first_nonfinite, nonfinite_of_ranks

CPU = torch.device("cpu")


def state(*tensors, **options):
    return lambda: [
        StateTensor(name=f"weight {number}", tensor=tensor, **options) for number, tensor in enumerate(tensors)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_is_found_and_named(dtype, bad):
    fine, empty, whole = torch.randn(3, 4).to(dtype), torch.empty(0, dtype=dtype), torch.arange(3)
    for place in (0, 17, 1002):
        spoilt = torch.randn(1003).to(dtype)
        spoilt[place] = bad
        found = state(fine, empty, whole, torch.ones(()), spoilt, spoilt.clone())
        assert not all_finite(found(), CPU)
        assert first_nonfinite(found) == "weight 4 is not finite"
        assert nonfinite_of_ranks(found, CPU, None) == "weight 4 is not finite"
    kept = state(fine, empty, whole, torch.full((2,), torch.finfo(dtype).max, dtype=dtype))
    assert all_finite(kept(), CPU)
    assert nonfinite_of_ranks(kept, CPU, None) is None


def test_nothing_is_finite():
    assert nonfinite_of_ranks(state(), CPU, None) is None


@pytest.mark.parametrize(
    ("value", "dtypes", "finite"),
    [
        (3.4e38, (torch.float32,), True),
        # Rounded to bfloat16, it is infinite; 3.389e38 is bfloat16's largest.
        (3.4e38, (torch.float32, torch.bfloat16), False),
        (3.389e38, (torch.bfloat16,), True),
        (65504.0, (torch.float16,), True),
        (-7e4, (torch.float16,), False),
    ],
)
def test_a_weight_must_be_finite_in_the_dtype_that_it_is_sent_in(value, dtypes, finite):
    assert bool(torch.tensor(value).to(dtypes[-1]).isfinite()) == finite
    found = first_nonfinite(state(torch.tensor([0.0, value]), dtypes=dtypes))
    assert (found is None) == finite
    if not finite:
        assert f"has values up to {abs(value):.3g}, which" in found
        assert str(dtypes[-1]).removeprefix("torch.") in found


def test_adapter_weights_must_be_finite_once_they_are_merged():
    a_RI, b_OR = torch.full((1, 2), 3e19), torch.full((2, 1), 3e19)
    assert not (b_OR @ a_RI).isfinite().any()
    found = first_nonfinite(state(a_RI, b_OR, merged=True))
    assert found == "weight 0 has values up to 3e+19, which its product with the other adapter weight cannot hold"
    assert first_nonfinite(state(a_RI / 10, b_OR / 10, merged=True)) is None
