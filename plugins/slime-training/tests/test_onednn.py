"""oneDNN's linear layers against float64."""

import pytest
import torch
from torch import nn

from slime_training.onednn import onednn_available, use_onednn


def double_of(layer):
    copy = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None).double()
    copy.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    return copy


@pytest.mark.parametrize("shape", [(3, 40), (1, 5), (200,)], ids=str)
@pytest.mark.parametrize("features", [(7, 33), (33, 7)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients(shape, features, bias):
    """More rows than features, fewer (which stay with torch), and more than two dimensions."""
    assert onednn_available()
    torch.manual_seed(0)
    layer = nn.Linear(*features, bias=bias)
    exact_layer = double_of(layer)
    use_onednn(layer)
    x = torch.randn(*shape, features[0], requires_grad=True)
    exact_x = x.detach().double().requires_grad_()
    found, expected = layer(x), exact_layer(exact_x)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    shape_of_loss = torch.linspace(-1, 1, found.numel()).view_as(found)
    (found * shape_of_loss).sum().backward()
    (expected * shape_of_loss.double()).sum().backward()
    pairs = [(x, exact_x), (layer.weight, exact_layer.weight)]
    for one, other in [*pairs, (layer.bias, exact_layer.bias)] if bias else pairs:
        torch.testing.assert_close(one.grad.double(), other.grad, atol=1e-4, rtol=1e-4)


def test_frozen_weights_and_inference():
    layer = nn.Linear(8, 16)
    use_onednn(layer)
    layer.weight.requires_grad_(False)
    x = torch.randn(64, 8, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert x.grad is not None
    with torch.inference_mode():
        expected = x @ layer.weight.t() + layer.bias
        torch.testing.assert_close(layer(x), expected)


def test_new_weights_are_used():
    """Nothing of the old weights is cached."""
    layer = nn.Linear(8, 16, bias=False)
    use_onednn(layer)
    x = torch.randn(64, 8)
    layer(x)
    with torch.no_grad():
        layer.weight.fill_(2.0)
        torch.testing.assert_close(layer(x), (2 * x.sum(1, keepdim=True)).expand(-1, 16))
