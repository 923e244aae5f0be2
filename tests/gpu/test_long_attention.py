"""cuDNN's attention of long segments against the formula in float32: `pytest tests/gpu/test_long_attention.py`."""

import pytest
import torch

from slime_training.long_attention import attend_long

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


def drawn(*shape):
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16).requires_grad_()


def by_formula(q, k, v, scale):
    """(L, H, D), (M, K, D), (M, K, D) in float32: the last query is at the last key."""
    shared = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(shared, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    last = torch.arange(len(q), device=DEVICE) + len(k) - len(q)
    unseen = torch.arange(len(k), device=DEVICE) > last[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(unseen, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("scale", [None, 0.2])
@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        pytest.param(1024, 1024, id="a sequence"),
        pytest.param(1000, 1000, id="of a length that is filled up"),
        pytest.param(1024, 2048, id="a chunk behind one"),
        pytest.param(1024, 4096, id="behind three"),
    ],
)
def test_outputs_and_gradients_equal_the_formula(queries, keys, scale):
    torch.manual_seed(0)
    q, k, v = drawn(queries, 8, 128), drawn(keys, 2, 128), drawn(keys, 2, 128)
    weight = torch.randn(queries, 8, 128, device=DEVICE)
    found = attend_long(q, k, v, scale)
    given = torch.autograd.grad((found.float() * weight).sum(), (q, k, v))

    exact = [x.detach().float().requires_grad_() for x in (q, k, v)]
    expected = by_formula(*exact, 128**-0.5 if scale is None else scale)
    of_exact = torch.autograd.grad((expected * weight).sum(), exact)
    for one, other in zip((found, *given), (expected, *of_exact), strict=True):
        assert one.shape == other.shape
        assert (one.float() - other).norm() < 1e-2 * other.norm()


def test_unsupported_shapes_return_none():
    q, k, v = (torch.randn(4096, 4, 40, device=DEVICE) for _ in range(3))
    assert attend_long(q, k, v, None) is None
