"""On one GPU: products in float8 against their emulation, and streams of any length."""

from copy import deepcopy

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_products_are_those_of_the_emulation(recipe):
    from slime_fsdp.float8_layers import use_float8

    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(256, 512, bias=False)).cuda().bfloat16()
    x, gradient = torch.randn(48, 256).cuda().bfloat16(), torch.randn(48, 512).cuda().bfloat16()
    found = []
    for emulate in (False, True):
        layer, given = deepcopy(plain), x.clone().requires_grad_()
        use_float8([layer], recipe, emulate=emulate)
        out = layer(given)
        out.backward(gradient)
        found.append([out, given.grad, layer[0].weight.grad])
    for real, emulated in zip(*found, strict=True):
        assert (real - emulated).float().norm() < 1e-2 * emulated.float().norm()


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_streams_of_any_length_train(recipe, folders, start, pack, samples, sequence_policy):
    """The emulation would take a stream that is not padded."""
    backend = start(folders("qwen3"), {"fp8_recipe": recipe}, device="cuda")
    plain = start(folders("qwen3"), device="cuda")
    for count in (1, 3, 7):
        micro = pack(samples[:count])
        found, expected = (one.forward_only([micro])[0].log_probs for one in (backend, plain))
        assert np.abs(found - expected).mean() < 0.3
        assert not backend.train_step([micro, pack([])], sequence_policy()).skipped
        assert not plain.train_step([micro, pack([])], sequence_policy()).skipped
