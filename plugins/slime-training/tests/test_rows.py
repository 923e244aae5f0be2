"""Gathered rows of a stream: the gradient of each is the sum over the places where it went."""

import numpy as np
import pytest
import torch

from slime_training.deterministic_gather import DeterministicGather, GatherUnique, places_of, take

NUM_ROWS = 9
REPEATED = np.array([4, 0, 8, 4, 1, 0, 7, 4])


@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_gradients_are_sums_over_where_rows_went(shape, dtype):
    torch.manual_seed(0)
    places = torch.from_numpy(places_of(REPEATED))
    x = torch.randn(NUM_ROWS, *shape).to(dtype).requires_grad_()
    grad = torch.randn(len(REPEATED), *shape).to(dtype)
    expected = np.zeros((NUM_ROWS, *shape))
    np.add.at(expected, REPEATED, grad.double().numpy())
    rows = torch.from_numpy(REPEATED)
    once = torch.autograd.grad(DeterministicGather.apply(x, rows), x, grad)[0]
    again = torch.autograd.grad(take(x, rows, places), x, grad)[0]
    assert torch.equal(take(x, rows, places), x[rows])
    assert torch.equal(once, again)
    torch.testing.assert_close(again.double().numpy(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_positions_of_rows():
    assert places_of(np.array([2, 0, 2])).tolist() == [[1, -1, 0], [-1, -1, 2]]
    assert places_of(np.array([], np.int64)).tolist() == [[]]
    assert places_of(np.array([3] * 5)) is None


def test_rows_that_are_not_gathered_get_no_nan_gradient():
    rows, places = torch.tensor([1, 2]), torch.from_numpy(places_of(np.array([1, 2])))
    x = torch.zeros(3, 2, requires_grad=True)
    grad = torch.full((2, 2), torch.nan)
    (found,) = torch.autograd.grad(take(x, rows, places), x, grad)
    assert found[0].tolist() == [0, 0]
    assert found[1:].isnan().all()


def test_rows_that_differ():
    rows = torch.tensor([5, 0, 3])
    x = torch.randn(6, 2, requires_grad=True)
    grad = torch.randn(3, 2)
    (found,) = torch.autograd.grad(GatherUnique.apply(x, rows), x, grad)
    assert torch.equal(found, torch.zeros(6, 2).index_put((rows,), grad))
