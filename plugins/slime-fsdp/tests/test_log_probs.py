"""The chunked head against autograd through the whole matrix."""

import pytest
import torch

from slime_fsdp.log_probs import log_probs_of


def dense(hidden, weight, bias, targets, temperature):
    log_p = (torch.nn.functional.linear(hidden, weight, bias) / temperature).log_softmax(-1)
    return log_p[torch.arange(len(targets)), targets], -(log_p.exp() * log_p).sum(-1)


def inputs(num_targets: int, with_bias: bool):
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in ((num_targets, 6), (11, 6), (11,))
    )
    targets = torch.randint(0, 11, (num_targets,), generator=generator)
    return hidden, weight, bias if with_bias else None, targets


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_equal_dense_autograd(chunk, with_bias):
    hidden, weight, bias, targets = inputs(9, with_bias)
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    scale = torch.linspace(-1, 2, 9, dtype=torch.float64)
    expected = dense(hidden, weight, bias, targets, 0.6)
    required = torch.autograd.grad((expected[0] * scale + expected[1] * scale.cos()).sum(), leaves)
    found = log_probs_of(hidden, weight, bias, targets, temperature=0.6, chunk=chunk, entropy="gradient")
    given = torch.autograd.grad((found[0] * scale + found[1] * scale.cos()).sum(), leaves)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(given, required)


def test_a_metric_entropy_has_no_gradient():
    hidden, weight, _, targets = inputs(5, False)
    log_probs, entropy = log_probs_of(hidden, weight, None, targets, temperature=1.0, chunk=2, entropy="metric")
    assert log_probs.requires_grad
    assert not entropy.requires_grad


def test_no_position_keeps_the_graph():
    hidden, weight, _, targets = inputs(0, False)
    log_probs, _ = log_probs_of(hidden, weight, None, targets, temperature=1.0, chunk=2, entropy="none")
    log_probs.sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_no_whole_matrix_of_logits_is_kept():
    hidden, weight, _, targets = inputs(9, False)
    log_probs, _ = log_probs_of(hidden, weight, None, targets, temperature=1.0, chunk=3, entropy="gradient")
    assert all(saved is None or saved.shape != (9, 11) for saved in log_probs.grad_fn.saved_tensors)
