"""KL estimators against float64 formulas written here, hand-worked numbers, and the definition of KL itself."""

from __future__ import annotations

import math
from importlib.metadata import entry_points

import numpy as np
import pytest
import torch

NAMES = ("k1", "k2", "k3", "low_var_kl")


def estimator(name):
    driver = entry_points(group="slime.kl")[name].load()
    return driver.build(driver.Config())


def oracle(name, log_prob, ref, ratio=1.0):
    d = log_prob - ref
    if name == "k1":
        return ratio * d
    if name == "k2":
        return ratio * d * d / 2
    d = min(max(d, -20.0), 20.0)
    k3 = ratio * (math.exp(-d) - 1 + d)
    return k3 if name == "k3" else min(max(k3, -10.0), 10.0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # d = ln 2, then d = -ln 2: exp(-d) is 1/2 and 2.
        ("k1", [0.69314718, -0.69314718]),
        ("k2", [0.24022651, 0.24022651]),
        ("k3", [0.19314718, 0.30685282]),
        ("low_var_kl", [0.19314718, 0.30685282]),
    ],
)
def test_numbers_worked_by_hand(name, expected):
    ref = torch.tensor([-1.5, -1.5], dtype=torch.float64)
    log_probs = ref + math.log(2.0) * torch.tensor([1.0, -1.0], dtype=torch.float64)
    torch.testing.assert_close(
        estimator(name)(log_probs, ref), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-8
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weighted", [False, True])
def test_values_and_gradients_follow_the_float64_oracle(name, weighted):
    rng = np.random.default_rng(0)
    log_probs = rng.normal(-2.0, 1.5, size=60)
    ref = rng.normal(-2.0, 1.5, size=60)
    old = log_probs + rng.normal(0.0, 0.3, size=60)

    def value(x, t):
        return oracle(name, x, ref[t], math.exp(x - old[t]) if weighted else 1.0)

    expected = np.array([value(x, t) for t, x in enumerate(log_probs)])
    step = 1e-6
    slope = np.array([(value(x + step, t) - value(x - step, t)) / (2 * step) for t, x in enumerate(log_probs)])
    if name == "low_var_kl":
        assert (expected == 10.0).any(), "no token reaches the clamp: the case is trivial"
        smooth = np.abs(np.abs(expected) - 10.0) > 1e-3
        smooth |= expected == 10.0
    else:
        smooth = np.ones(60, dtype=bool)

    leaf = torch.tensor(log_probs, requires_grad=True)
    ratio = (leaf - torch.tensor(old)).exp() if weighted else None
    got = estimator(name)(leaf, torch.tensor(ref), ratio)
    got.sum().backward()
    np.testing.assert_allclose(got.detach().numpy(), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(leaf.grad.numpy()[smooth], slope[smooth], rtol=1e-6, atol=1e-7)


def test_low_var_kl_clamps_after_the_ratio():
    log_probs, ref = torch.tensor([-8.0]), torch.tensor([-5.0])  # k3 = e^3 - 1 - 3 = 16.0855
    kl = estimator("low_var_kl")
    assert kl(log_probs, ref).item() == 10.0
    assert kl(log_probs, ref, torch.tensor([0.5])).item() == pytest.approx(8.042768, abs=1e-5)
    assert kl(log_probs, ref, torch.tensor([2.0])).item() == 10.0


def test_the_gradient_flows_through_the_ratio():
    # k1 with ratio r = exp(l - old) at l = old has gradient r * (1 + d) = 1 + d.
    leaf = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    ratio = (leaf - torch.tensor([-1.0], dtype=torch.float64)).exp()
    estimator("k1")(leaf, torch.tensor([-1.5], dtype=torch.float64), ratio).sum().backward()
    assert leaf.grad.item() == pytest.approx(1.5, abs=1e-12)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_kl_of_the_distributions(name):
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    exact = sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    assert (p * estimator(name)(p.log(), q.log())).sum().item() == pytest.approx(exact, abs=1e-12)


@pytest.mark.parametrize(("name", "exact"), [("k1", False), ("k2", True)])
def test_expected_gradient_as_a_loss(name, exact):
    """k1's is zero; k2's is that of the true KL. Over logits, tokens weighted by the sampling distribution."""
    logits = torch.tensor([0.3, -0.2, 0.5, 0.1], dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.tensor([0.1, 0.4, -0.6, 0.2], dtype=torch.float64), 0)
    log_probs = torch.log_softmax(logits, 0)
    (true_gradient,) = torch.autograd.grad((log_probs.exp() * (log_probs - ref)).sum(), logits, retain_graph=True)
    (gradient,) = torch.autograd.grad((log_probs.exp().detach() * estimator(name)(log_probs, ref)).sum(), logits)
    assert true_gradient.abs().max() > 0.1
    torch.testing.assert_close(gradient, true_gradient if exact else torch.zeros_like(gradient), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_equal_log_probs_give_zero_and_no_tokens_keep_the_graph(name):
    same = torch.tensor([-0.1, -7.0, 0.0])
    assert (estimator(name)(same, same) == 0).all()
    empty = torch.zeros(0, requires_grad=True)
    out = estimator(name)(empty, torch.zeros(0))
    assert out.shape == (0,)
    out.sum().backward()
    assert empty.grad.shape == (0,)


@pytest.mark.parametrize("name", ["k3", "low_var_kl"])
def test_extreme_gaps_stay_finite_and_never_push_the_wrong_way(name):
    leaf = torch.tensor([-500.0, -0.0], requires_grad=True)
    out = estimator(name)(leaf, torch.tensor([0.0, -500.0]))
    out.sum().backward()
    assert torch.isfinite(out).all()
    assert leaf.grad.tolist() == [0.0, 0.0]


def test_k3_in_float32_keeps_small_differences():
    d = 1e-4
    got = estimator("k3")(torch.tensor([d]), torch.tensor([0.0])).item()
    assert got == pytest.approx(d * d / 2, rel=1e-2)


def test_shape_and_dtype_are_kept():
    for dtype in (torch.float32, torch.float64):
        out = estimator("k3")(torch.zeros(2, 3, dtype=dtype), torch.ones(2, 3, dtype=dtype))
        assert out.shape == (2, 3)
        assert out.dtype == dtype
