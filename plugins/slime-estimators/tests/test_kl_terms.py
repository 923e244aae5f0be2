"""KL as a term of the loss and in the reward, through the kernel: against definitions and float64 formulas."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.metadata import entry_points

import numpy as np
import pytest
import torch
from correction_scenes import LENGTHS, MASKS, WHOLE, Reinforce, loss_weights, make_scene

from slime_core.algorithm.advantages import AdvantageConfig, compute_advantages_and_returns
from slime_core.algorithm.loss import TokenObjective
from slime_core.algorithm.packing import pack_micro_batch
from slime_core.contracts.advantage import AdvantageEstimator, Credit
from slime_core.types.batch import TokenColumns
from slime_training.segments import LocalSegments

NAMES = ("k1", "k2", "k3", "low_var_kl")
SPLIT = [[0, 2], [3, 5], [4, 1]]


def estimator(name):
    driver = entry_points(group="slime.kl")[name].load()
    return driver.build(driver.Config())


def formula(name, gap, ratio=1.0):
    """k x ratio, in float64."""
    if name == "k1":
        return ratio * gap
    if name == "k2":
        return ratio * gap * gap / 2
    k3 = ratio * (math.exp(-gap) - 1 + gap)
    return k3 if name == "k3" else min(max(k3, -10.0), 10.0)


# --- In the loss ------------------------------------------------------------------------------------------------------


def vocabulary_as_tokens(kl, logits, old, ref, unbiased):
    """The KL term where every word of a vocabulary occurs once, weighted with the probability that it was sampled: its
    value and gradient are then expectations under the old policy. Everything in float64."""
    scene = make_scene()
    micro = pack_micro_batch(scene.batch, np.array([0]), columns=scene.columns.take(np.arange(5)))
    columns = replace(
        micro.columns, old_log_probs=old, ref_log_probs=ref, loss_weight=old.exp(), advantages=torch.zeros(5)
    )
    objective = TokenObjective(
        loss=Reinforce(),
        needs=frozenset(),
        report_entropy=False,
        kl=estimator(kl),
        kl_loss_coef=1.0,
        use_unbiased_kl=unbiased,
    )
    log_probs = torch.log_softmax(logits, 0)
    micro = replace(micro, columns=columns)
    output = objective(micro, segments=LocalSegments(micro.segments, 1), log_probs=log_probs)
    (gradient,) = torch.autograd.grad(output.loss, logits)
    return float(output.loss.detach()), gradient


def policies():
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(3)]
    return draw[0].requires_grad_(), torch.log_softmax(draw[1], 0), torch.log_softmax(draw[2], 0)


@pytest.mark.parametrize("kl", ["k1", "k3"])
def test_unbiased_kl_is_the_kl_off_policy_in_value_and_gradient(kl):
    """E_old[exp(l - old) k(l, ref)] = KL(policy || ref) for every policy, so its gradient is the KL's too."""
    logits, old, ref = policies()
    log_probs = torch.log_softmax(logits, 0)
    exact = (log_probs.exp() * (log_probs - ref)).sum()
    (gradient,) = torch.autograd.grad(exact, logits)
    value, got = vocabulary_as_tokens(kl, logits, old, ref, unbiased=True)
    assert value == pytest.approx(float(exact.detach()), rel=1e-12)
    torch.testing.assert_close(got, gradient, rtol=1e-10, atol=1e-12)
    assert gradient.abs().max() > 0.05


@pytest.mark.parametrize("kl", ["k1", "k3"])
def test_without_it_the_term_is_another_number(kl):
    logits, old, ref = policies()
    unbiased, _ = vocabulary_as_tokens(kl, logits, old, ref, unbiased=True)
    biased, _ = vocabulary_as_tokens(kl, logits, old, ref, unbiased=False)
    assert abs(unbiased - biased) > 0.05
    expected = sum(
        float(p.exp()) * formula(kl, float(x - r))
        for p, x, r in zip(old, torch.log_softmax(logits, 0).detach(), ref, strict=True)
    )
    assert biased == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("kl", NAMES)
def test_the_loss_term_in_three_micro_batches(kl, unbiased):
    """0.3 x the sum of weight x exp(l - old) x k, beside the policy loss, and its gradient by finite differences."""
    scene = make_scene(move=0.5)
    batch = scene.batch
    rng = np.random.default_rng(4)
    ref = [(values + 0.5 * rng.normal(size=len(values))).astype(np.float32).astype(float) for values in scene.old]
    ref[0][1] += 3.5  # k3 of this token is beyond the clamp of low_var_kl
    weight = np.concatenate([[w * bit for bit in mask] for w, mask in zip(loss_weights(), MASKS, strict=True)])
    columns = replace(
        scene.columns,
        ref_log_probs=np.concatenate(ref).astype(np.float32),
        loss_weight=weight.astype(np.float32),
        advantages=np.zeros(len(weight), np.float32),
    )
    ref = [row.astype(np.float32).astype(float) for row in ref]

    def term(n, t, x):
        ratio = math.exp(x - scene.old[n][t]) if unbiased else 1.0
        return MASKS[n][t] * loss_weights()[n] * formula(kl, x - ref[n][t], ratio)

    step = 1e-6
    tokens = [(n, t) for n, (_, r) in enumerate(LENGTHS) for t in range(r)]
    expected = sum(term(n, t, scene.current[n][t]) for n, t in tokens)
    slopes = [
        (term(n, t, scene.current[n][t] + step) - term(n, t, scene.current[n][t] - step)) / (2 * step)
        for n, t in tokens
    ]
    objective = TokenObjective(
        loss=Reinforce(),
        needs=frozenset(),
        report_entropy=False,
        kl=estimator(kl),
        kl_loss_coef=0.3,
        use_unbiased_kl=unbiased,
    )
    leaf = torch.tensor(scene.flat("current"), requires_grad=True)
    for splits in (WHOLE, SPLIT):
        leaf.grad, sums = None, {}
        for samples in splits:
            micro = pack_micro_batch(batch, np.array(samples), columns=columns)
            rows = torch.from_numpy(batch.response_rows(np.array(samples)))
            output = objective(micro, segments=LocalSegments(micro.segments, micro.num_samples), log_probs=leaf[rows])
            output.loss.backward()
            sums = {name: sums.get(name, 0.0) + float(value) for name, value in output.sums.items()}
        assert sums["kl_loss"] == pytest.approx(expected, rel=1e-6)
        assert sums["loss"] == pytest.approx(sums["pg_loss"] + 0.3 * expected, rel=1e-6)
        np.testing.assert_allclose(leaf.grad.numpy(), 0.3 * np.array(slopes), rtol=2e-6, atol=1e-8)


# --- In the reward ----------------------------------------------------------------------------------------------------


class TakesThePenalty(AdvantageEstimator):
    """A = r - the KL of the token."""

    def estimate(self, inputs):
        return Credit(advantages=(inputs.rewards[inputs.batch.sample_of_token] - inputs.kl_penalty).astype(np.float32))


@pytest.mark.parametrize("kl", NAMES)
def test_the_penalty_on_the_reward(kl):
    """kl_coef x k(old, ref) at trained tokens: of the old policy, and 0 where nothing is trained, whatever is there."""
    scene = make_scene(garbage=True)
    rng = np.random.default_rng(4)
    ref = [(values + 0.5 * rng.normal(size=len(values))).astype(np.float32).astype(float) for values in scene.old]
    old, mask = scene.columns.old_log_probs, scene.flat_mask
    given = np.where(mask, np.concatenate(ref), np.nan).astype(np.float32)
    rules = AdvantageConfig(
        advantage=TakesThePenalty(), kl_reward=estimator(kl), kl_coef=0.2, rollouts_per_step=5, max_response_len=8
    )
    made = compute_advantages_and_returns(scene.batch, TokenColumns(old_log_probs=old, ref_log_probs=given), rules)
    penalty = [
        0.2 * formula(kl, o - r) for os, rs in zip(scene.old, ref, strict=True) for o, r in zip(os, rs, strict=True)
    ]
    expected = np.where(mask, scene.batch.reward[scene.batch.sample_of_token] - penalty, 0)
    np.testing.assert_allclose(made.columns.advantages, expected, rtol=1e-5, atol=1e-6)
    assert made.metrics["rollout/kl"] == pytest.approx(np.array(penalty)[mask].mean() / 0.2, rel=1e-5)
