"""The RMS norm against its formula in float64."""

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from slime_training.rms_norm import use_rms_norm


@pytest.mark.parametrize("shape", [(70, 24), (1, 9, 3, 8)], ids=str)
def test_outputs_and_gradients(shape):
    torch.manual_seed(0)
    norm = Qwen3RMSNorm(shape[-1], eps=1e-3)
    nn.init.normal_(norm.weight)
    use_rms_norm(norm)
    x = torch.randn(shape, requires_grad=True)
    exact_x, exact_weight = (value.detach().double().requires_grad_() for value in (x, norm.weight))
    expected = exact_x / (exact_x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * exact_weight
    found = norm(x)
    assert found.grad_fn.name().startswith("_RmsNorm")
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-6)
    shape_of_loss = torch.linspace(-1, 1, found.numel()).view_as(found)
    (found * shape_of_loss).sum().backward()
    (expected * shape_of_loss.double()).sum().backward()
    torch.testing.assert_close(x.grad.double(), exact_x.grad, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(norm.weight.grad.double(), exact_weight.grad, atol=1e-5, rtol=1e-5)
    with torch.inference_mode():
        torch.testing.assert_close(norm(x).double(), expected, atol=1e-6, rtol=1e-6)


def test_another_formula_stays():
    """Gemma scales by 1 + weight."""
    norm, x = GemmaRMSNorm(8), torch.randn(5, 8)
    before = norm(x)
    use_rms_norm(norm)
    assert "forward" not in vars(norm)
    assert torch.equal(norm(x), before)
