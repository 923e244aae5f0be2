"""KL estimators, token by token."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from slime_core.contracts.example import KlExample
from slime_plugin_kit.case import Case
from slime_plugin_kit.compare import require_same
from slime_plugin_kit.differences import gradient_by_differences

GAPS = (-2.0, -0.7, -0.1, -1e-3, 1e-3, 0.1, 0.7, 2.0)
"""log-prob less that of the reference, in nats."""
ROUNDING = 1e-6


def pair(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Log-probs, and those of the reference."""
    gaps = torch.tensor(GAPS, dtype=torch.float64)
    reference = -1.0 - torch.arange(len(GAPS), dtype=torch.float64) / 4
    return (reference + gaps).to(dtype), reference.to(dtype)


def distributions(seed: int, spread: float = 1.0) -> list[Tensor]:
    """Log-probs of the policy, the reference and an older policy over the same five tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [(spread * torch.randn(5, generator=generator, dtype=torch.float64)).log_softmax(0) for _ in range(3)]


def test_anchored_by_hand(case: Case) -> None:
    anchors = [(of, example) for of in case.subject.cases for example in of.examples(KlExample)]
    assert anchors, (
        "no numbers worked out by hand: give its driver a classmethod `examples` that returns a "
        "slime_core.contracts.example.KlExample"
    )
    for of, example in anchors:
        label = f"with {of.label or 'its defaults'}"
        log_probs = torch.tensor(example.log_probs, dtype=torch.float64, requires_grad=True)
        reference = torch.tensor(example.ref_log_probs, dtype=torch.float64)
        ratio = None if example.ratio is None else torch.tensor(example.ratio, dtype=torch.float64)
        values = of.build()(log_probs, reference, ratio)
        (gradient,) = torch.autograd.grad(values.sum(), log_probs)
        require_same(f"values {label}", values.detach().numpy(), example.values, tolerance=ROUNDING)
        require_same(f"gradient {label}", gradient.numpy(), example.gradient, tolerance=ROUNDING)


def test_zero_at_equality(case: Case) -> None:
    for dtype in (torch.float32, torch.float64):
        log_probs, _ = pair(dtype)
        values = case.build()(log_probs, log_probs.clone())
        assert (values == 0).all(), f"where policy and reference agree it gives {values.tolist()}"


def test_positive_on_average(case: Case) -> None:
    estimator = case.build()
    for seed in range(20):
        policy, reference, _ = distributions(seed)
        average = float((policy.exp() * estimator(policy, reference)).sum())
        assert average > 0, (
            f"the average over what the policy samples is {average:.4g} where policy and reference differ: a KL is "
            "positive there"
        )


def test_never_negative(case: Case) -> None:
    values = case.build()(*pair())
    assert (values >= 0).all(), f"its driver declares never_negative, and it gives {values.tolist()}"


def test_gradient_equals_finite_differences(case: Case) -> None:
    estimator = case.build()
    log_probs, reference = pair()
    for ratio in (None, torch.linspace(0.5, 2.0, len(GAPS), dtype=torch.float64)):

        def function(leaf: Tensor, ratio: Tensor | None = ratio) -> Tensor:
            total: Tensor = estimator(leaf, reference, ratio).sum()
            return total

        leaf = log_probs.clone().requires_grad_()
        (got,) = torch.autograd.grad(function(leaf), leaf)
        label = "with a ratio" if ratio is not None else "without a ratio"
        require_same(f"gradient {label}", got.numpy(), gradient_by_differences(function, log_probs), tolerance=ROUNDING)
        assert got.abs().max() > 1e-4, f"the gradient {label} is zero everywhere"


def test_float32_agrees_with_float64(case: Case) -> None:
    estimator = case.build()
    exact = pair(torch.float32)
    got = estimator(*exact)
    assert got.dtype == torch.float32, f"float32 in, {got.dtype} out"
    wide = estimator(*(tensor.double() for tensor in exact))
    require_same("values in float32", got.numpy(), wide.numpy(), tolerance=ROUNDING)


def test_the_ratio_makes_it_exact_off_policy(case: Case) -> None:
    """Over all tokens of a small vocabulary: sum of old x k(ratio) is the sum of policy x k, in value and gradient."""
    estimator = case.build()
    for seed in range(5):
        # Close enough to each other that no estimator has to clamp.
        policy, reference, old = distributions(seed, spread=0.3)
        results = []
        for off_policy in (True, False):
            logits = policy.clone().requires_grad_()
            log_probs = logits.log_softmax(0)
            if off_policy:
                average = (old.exp() * estimator(log_probs, reference, (log_probs - old).exp())).sum()
            else:
                average = (log_probs.exp() * estimator(log_probs, reference)).sum()
            (gradient,) = torch.autograd.grad(average, logits)
            results.append((average.item(), gradient.numpy()))
        (got, got_gradient), (expected, expected_gradient) = results
        require_same("average over an older policy's samples", got, expected, tolerance=ROUNDING)
        require_same("its gradient", got_gradient, expected_gradient, tolerance=ROUNDING)


def test_extreme_log_probs_stay_finite(case: Case) -> None:
    estimator = case.build()
    gaps = torch.tensor([-1e4, -200.0, -50.0, 50.0, 200.0, 1e4])
    for ratio in (None, torch.full_like(gaps, float(np.exp(20.0)))):
        log_probs = gaps.clone().requires_grad_()
        values = estimator(log_probs, torch.zeros_like(gaps), ratio)
        (gradient,) = torch.autograd.grad(values.sum(), log_probs)
        assert torch.isfinite(values).all(), f"at gaps {gaps.tolist()} it gives {values.tolist()}: clamp before exp"
        assert torch.isfinite(gradient).all(), f"at gaps {gaps.tolist()} its gradient is {gradient.tolist()}"


def test_tokens_are_independent(case: Case) -> None:
    estimator = case.build()
    log_probs, reference = pair()
    whole = estimator(log_probs, reference)
    assert whole.shape == log_probs.shape, f"shape {tuple(log_probs.shape)} in, {tuple(whole.shape)} out"
    for shape in ((2, 4), (8, 1)):
        got = estimator(log_probs.reshape(shape), reference.reshape(shape))
        assert got.shape == shape, f"shape {shape} in, {tuple(got.shape)} out"
        require_same(f"values in the shape {shape}", got.flatten().numpy(), whole.numpy(), tolerance=1e-12)
    alone = [float(estimator(one, other)) for one, other in zip(log_probs, reference, strict=True)]
    require_same("values one at a time", alone, whole.numpy(), tolerance=1e-12)


def test_inputs_are_left_alone(case: Case) -> None:
    estimator = case.build()
    log_probs, reference = pair()
    ratio = torch.linspace(0.5, 2.0, len(GAPS), dtype=torch.float64)
    given = {"log_probs": log_probs, "ref_log_probs": reference, "ratio": ratio}
    before = {name: tensor.clone() for name, tensor in given.items()}
    first = estimator(log_probs, reference, ratio).clone()
    written = [name for name, tensor in given.items() if not torch.equal(tensor, before[name])]
    assert not written, f"it writes into {', '.join(written)}"
    assert torch.equal(estimator(log_probs, reference, ratio), first), "called twice, it gives two results"
