"""The losses against scalar float64 formulas written here (no slime code in the oracle), numbers worked by hand, and
the invariances that the contract promises."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from slime_core.contracts.loss import LossInputs

VARIANTS = {
    "clip": ("clip", {}),
    "clip_asymmetric": ("clip", {"eps_clip": 0.1, "eps_clip_high": 0.28}),
    "dual_clip": ("clip", {"eps_clip_c": 1.5}),
    "sequence": ("sequence_clip", {"eps_clip": 0.05, "eps_clip_high": 0.08}),
    "sequence_default": ("sequence_clip", {}),
    "sequence_token": ("sequence_clip", {"eps_clip": 0.05, "eps_clip_high": 0.08, "token_level": True}),
    "cispo": ("cispo", {}),
    "cispo_narrow": ("cispo", {"eps_clip": 0.2, "eps_clip_high": 0.3}),
}
DEFAULTS = {"clip": (0.2, 0.2), "sequence_clip": (3e-4, 4e-4), "cispo": (1.0, 4.0)}
# Chosen so that clipped and unclipped tokens occur on both sides, for both signs of the advantage.
SEEDS = (3, 7)
TOL = {"rtol": 1e-10, "atol": 1e-12}


class Segments:
    """Reductions over samples in plain loops; counts its calls."""

    def __init__(self, owner, num_samples):
        self.owner, self._num_samples, self.calls = owner, num_samples, 0

    @property
    def num_samples(self):
        return self._num_samples

    def seq_sum(self, values):
        self.calls += 1
        if not self._num_samples:
            return values[:0]
        return torch.stack([values[self.owner == i].sum() for i in range(self._num_samples)])

    def expand(self, values):
        self.calls += 1
        return values[self.owner]


class Case:
    """Eight samples: uneven lengths, one empty response, one fully masked, tool tokens in between."""

    def __init__(self, seed=0, spread=0.4, lengths=(5, 0, 7, 3, 1, 4, 6, 2)):
        rng = np.random.default_rng(seed)
        self.lengths = list(lengths)
        total = sum(lengths)
        self.owner = np.repeat(np.arange(len(lengths)), lengths)
        self.mask = rng.random(total) > 0.25
        if len(lengths) > 3:
            self.mask[self.owner == 3] = False
        self.l = rng.normal(-2.0, 1.0, total)
        self.lo = self.l - rng.normal(0.0, spread, total)
        self.adv = rng.normal(0.0, 1.0, len(lengths))[self.owner]
        self.w = rng.random(total) * self.mask

    def inputs(self, rows=slice(None), dtype=torch.float64):
        leaf = torch.tensor(self.l[rows], dtype=dtype, requires_grad=True)
        return leaf, LossInputs(
            mask=torch.tensor(self.mask[rows], dtype=torch.bool),
            log_probs=leaf,
            old_log_probs=torch.tensor(self.lo[rows], dtype=dtype),
            advantages=torch.tensor(self.adv[rows], dtype=dtype),
        )

    def segments(self, rows=slice(None), first=0, count=None):
        owner = torch.tensor(self.owner[rows] - first, dtype=torch.int64)
        return Segments(owner, len(self.lengths) if count is None else count)


def bounds(loss, options):
    low, high = DEFAULTS[loss]
    low = options.get("eps_clip", low)
    high = options.get("eps_clip_high", low if loss == "clip" else high)
    return 1 - low, 1 + high


def oracle(case, loss, options, log_probs, fixed):
    """Per-token values, 0 at masked tokens, as a function of `log_probs`; `fixed` are those that sg() holds still."""
    low, high = bounds(loss, options)
    values = np.zeros(len(log_probs))
    for i in range(len(case.lengths)):
        tokens = [t for t in range(len(log_probs)) if case.owner[t] == i and case.mask[t]]

        def mean_ratio(source, tokens=tokens):
            return math.exp(sum(source[t] - case.lo[t] for t in tokens) / max(len(tokens), 1))

        for t in tokens:
            advantage = case.adv[t]
            if loss == "cispo":
                weight = min(max(math.exp(fixed[t] - case.lo[t]), low), high)
                values[t] = -weight * advantage * log_probs[t]
                continue
            if loss == "clip":
                ratio = math.exp(log_probs[t] - case.lo[t])
            elif options.get("token_level"):
                ratio = mean_ratio(fixed) * math.exp(log_probs[t] - fixed[t])
            else:
                ratio = mean_ratio(log_probs)
            value = max(-ratio * advantage, -min(max(ratio, low), high) * advantage)
            if "eps_clip_c" in options and advantage < 0:
                value = min(value, -options["eps_clip_c"] * advantage)
            values[t] = value
    return values


def oracle_gradient(case, loss, options, step=1e-6):
    """Central differences of the weighted sum."""

    def total(log_probs):
        return float(case.w @ oracle(case, loss, options, log_probs, case.l))

    gradient = np.zeros(len(case.l))
    for t in range(len(case.l)):
        up, down = case.l.copy(), case.l.copy()
        up[t] += step
        down[t] -= step
        gradient[t] = (total(up) - total(down)) / (2 * step)
    return gradient


def run(part, case, variant, rows=slice(None), first=0, count=None, dtype=torch.float64):
    loss, options = VARIANTS[variant]
    leaf, inputs = case.inputs(rows, dtype)
    output = part("slime.losses", loss, **options)(inputs, case.segments(rows, first, count))
    torch.dot(output.values, torch.tensor(case.w[rows], dtype=dtype)).backward()
    return output, leaf.grad.numpy()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_values_and_gradients_follow_the_oracle(part, variant, seed):
    case = Case(seed)
    loss, options = VARIANTS[variant]
    expected = oracle(case, loss, options, case.l, case.l)
    slope = oracle_gradient(case, loss, options)
    assert np.abs(expected).max() > 0.5
    assert (np.abs(slope) > 1e-3).sum() >= 2
    output, gradient = run(part, case, variant)
    np.testing.assert_allclose(np.where(case.mask, output.values.detach(), 0.0), expected, **TOL)
    np.testing.assert_allclose(gradient, slope, rtol=1e-6, atol=1e-8)
    assert (gradient[~case.mask] == 0).all()


@pytest.mark.parametrize("variant", ["clip", "clip_asymmetric", "dual_clip", "sequence", "cispo_narrow"])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_oracle_cases_reach_every_branch(variant, seed):
    """Guards the test above: it could not notice a missing bound that no token of its cases reaches."""
    case = Case(seed)
    loss, options = VARIANTS[variant]
    low, high = bounds(loss, options)
    ratio = np.exp(case.l - case.lo)
    if loss == "sequence_clip":
        for i in range(len(case.lengths)):
            rows = (case.owner == i) & case.mask
            ratio[rows] = np.exp(np.log(ratio[rows]).mean()) if rows.any() else 1.0
    above, below = (ratio > high) & case.mask, (ratio < low) & case.mask
    for sign in (1, -1):
        required = sign * case.adv > 0
        assert (above & required).any()
        assert (below & required).any()
    assert (case.mask & ~above & ~below).any()
    if variant == "dual_clip":
        assert ((ratio > 1.5) & (case.adv < 0) & case.mask).any()


def single(part, loss, log_ratio, advantage, **options):
    """One sample of one token at l = -1; value, gradient, metrics."""
    leaf = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    inputs = LossInputs(
        mask=torch.tensor([True]),
        log_probs=leaf,
        old_log_probs=torch.tensor([-1.0 - log_ratio], dtype=torch.float64),
        advantages=torch.tensor([advantage], dtype=torch.float64),
    )
    output = part("slime.losses", loss, **options)(inputs, Segments(torch.tensor([0]), 1))
    output.values.sum().backward()
    return output.values.item(), leaf.grad.item(), {k: v.item() for k, v in output.metrics.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "options", "value", "gradient", "clipped"),
    [
        (1.5, 2.0, {}, -2.4, 0.0, 1.0),  # above, A > 0: clipped at 1.2
        (1.5, -2.0, {}, 3.0, 3.0, 0.0),  # above, A < 0: full gradient
        (0.5, -2.0, {}, 1.6, 0.0, 1.0),  # below, A < 0: clipped at 0.8
        (0.5, 2.0, {}, -1.0, -1.0, 0.0),  # below, A > 0: full gradient
        (1.1, 2.0, {}, -2.2, -2.2, 0.0),  # inside
        (1.0, 2.0, {}, -2.0, -2.0, 0.0),  # on-policy: not halved by the tie
        (1.25, 2.0, {"eps_clip_high": 0.28}, -2.5, -2.5, 0.0),
        (1.5, 2.0, {"eps_clip_high": 0.28}, -2.56, 0.0, 1.0),
        (0.75, -2.0, {"eps_clip_high": 0.28}, 1.6, 0.0, 1.0),  # the lower bound stays 0.8
        (5.0, -2.0, {"eps_clip_c": 3.0}, 6.0, 0.0, 0.0),  # 10 without the dual clip
        (2.0, -2.0, {"eps_clip_c": 3.0}, 4.0, 4.0, 0.0),
        (5.0, 2.0, {"eps_clip_c": 3.0}, -2.4, 0.0, 1.0),  # only for negative advantages
    ],
)
def test_clip_by_hand(part, ratio, advantage, options, value, gradient, clipped):
    got, slope, metrics = single(part, "clip", math.log(ratio), advantage, **options)
    assert got == pytest.approx(value, abs=1e-12)
    assert slope == pytest.approx(gradient, abs=1e-12)
    assert metrics == {"pg_clipfrac": clipped, "ppo_kl": pytest.approx(-math.log(ratio), abs=1e-12)}


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient", "clipped"),
    [
        (2.0, 3.0, 6.0, -6.0, 0.0),  # -2 x 3 x l with l = -1
        (7.0, 3.0, 15.0, -15.0, 1.0),  # weight held at 5, and yet it trains
        (0.01, 3.0, 0.03, -0.03, 0.0),  # no lower bound
        (7.0, -3.0, -15.0, 15.0, 1.0),
    ],
)
def test_cispo_by_hand(part, ratio, advantage, value, gradient, clipped):
    got, slope, metrics = single(part, "cispo", math.log(ratio), advantage)
    assert got == pytest.approx(value, abs=1e-12)
    assert slope == pytest.approx(gradient, abs=1e-12)
    assert metrics == {"pg_clipfrac": clipped, "ppo_kl": pytest.approx(-math.log(ratio), abs=1e-12)}


@pytest.mark.parametrize("token_level", [False, True])
def test_sequence_clip_by_hand(part, token_level):
    # Sample 0: log-ratios 0.3, -0.1 and a tool token: mean 0.1, s = e^0.1 = 1.10517. Sample 1: 0.5, s = 1.64872.
    log_ratio = torch.tensor([0.3, -0.1, 7.0, 0.5], dtype=torch.float64)
    leaf = torch.tensor([-1.0, -2.0, -3.0, -4.0], dtype=torch.float64, requires_grad=True)
    inputs = LossInputs(
        mask=torch.tensor([True, True, False, True]),
        log_probs=leaf,
        old_log_probs=leaf.detach() - log_ratio,
        advantages=torch.tensor([2.0, 2.0, 2.0, 1.0], dtype=torch.float64),
    )
    loss = part("slime.losses", "sequence_clip", eps_clip=0.2, eps_clip_high=0.2, token_level=token_level)
    output = loss(inputs, Segments(torch.tensor([0, 0, 0, 1]), 2))
    output.values.sum().backward()
    np.testing.assert_allclose(output.values.detach(), [-2.2103418, -2.2103418, 0.0, -1.2], atol=1e-7)
    # d/dl of -2 s x 2 tokens through a mean over 2: -2 s each; the second sample is clipped.
    np.testing.assert_allclose(leaf.grad, [-2.2103418, -2.2103418, 0.0, 0.0], atol=1e-7)
    np.testing.assert_allclose(output.metrics["ppo_kl"], [-0.1, -0.1, 0.0, -0.5], atol=1e-12)
    assert output.metrics["pg_clipfrac"].tolist() == [0.0, 0.0, 0.0, 1.0]


def test_sequence_clip_defaults_clip_at_3e_4_and_4e_4(part):
    for log_ratio, advantage, expected in [(5e-4, 1.0, -1.0004), (-5e-4, -1.0, 0.9997)]:
        value, slope, metrics = single(part, "sequence_clip", log_ratio, advantage)
        assert value == pytest.approx(expected, abs=1e-12)
        assert slope == 0.0
        assert metrics["pg_clipfrac"] == 1.0
    assert single(part, "sequence_clip", 3e-4, 1.0)[1] == pytest.approx(-math.exp(3e-4), abs=1e-12)


def test_the_token_variant_differs_once_advantages_vary_in_a_sample(part):
    case = Case(0)
    _, sequence = run(part, case, "sequence")
    _, token = run(part, case, "sequence_token")
    # Weights vary within a sample in this case, so the two differ; with the same weights they must agree.
    assert np.abs(sequence - token).max() > 1e-3
    case.w = case.mask * 0.1
    _, sequence = run(part, case, "sequence")
    _, token = run(part, case, "sequence_token")
    assert np.abs(sequence).max() > 1e-3
    np.testing.assert_allclose(sequence, token, **TOL)
    case.adv = case.adv * np.linspace(0.5, 2.0, len(case.adv))
    _, sequence = run(part, case, "sequence")
    _, token = run(part, case, "sequence_token")
    assert np.abs(sequence - token).max() > 1e-3


@pytest.mark.parametrize("variant", VARIANTS)
def test_metrics_follow_their_definitions_and_carry_no_gradient(part, variant):
    case = Case(2)
    loss, options = VARIANTS[variant]
    low, high = bounds(loss, options)
    output, _ = run(part, case, variant)
    gap = case.lo - case.l
    if loss == "sequence_clip":
        rows = [(case.owner == i) & case.mask for i in range(len(case.lengths))]
        means = [gap[row].mean() if row.any() else 0.0 for row in rows]
        gap = np.array(means)[case.owner]
    ratio = np.exp(-gap)
    held = np.clip(ratio, low, high)
    changed = held != ratio if loss == "cispo" else -held * case.adv > -ratio * case.adv
    assert set(output.metrics) == {"pg_clipfrac", "ppo_kl"}
    np.testing.assert_allclose(output.metrics["ppo_kl"], np.where(case.mask, gap, 0.0), **TOL)
    np.testing.assert_array_equal(output.metrics["pg_clipfrac"], changed & case.mask)
    assert not any(value.requires_grad for value in output.metrics.values())


@pytest.mark.parametrize("variant", VARIANTS)
def test_sample_order_and_micro_batches_change_nothing(part, variant):
    case = Case(4)
    whole, gradient = run(part, case, variant)
    starts = np.concatenate([[0], np.cumsum(case.lengths)])

    for i in range(len(case.lengths)):
        rows = slice(starts[i], starts[i + 1])
        piece, piece_gradient = run(part, case, variant, rows, first=i, count=1)
        np.testing.assert_allclose(piece.values.detach(), whole.values.detach()[rows], **TOL)
        np.testing.assert_allclose(piece_gradient, gradient[rows], **TOL)
        for name, values in piece.metrics.items():
            np.testing.assert_allclose(values, whole.metrics[name][rows], **TOL)

    order = [3, 6, 0, 4, 7, 2, 1, 5]
    rows = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in order])
    shuffled = Case(4)
    shuffled.owner = np.array([order.index(i) for i in case.owner])
    moved, moved_gradient = run(part, shuffled, variant, rows)
    np.testing.assert_allclose(moved.values.detach(), whole.values.detach()[rows], **TOL)
    np.testing.assert_allclose(moved_gradient, gradient[rows], **TOL)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_masked_tokens_may_hold_anything(part, variant, poison):
    clean = Case(5)
    _, expected = run(part, clean, variant)
    dirty = Case(5)
    for column in (dirty.l, dirty.lo, dirty.adv):
        column[~dirty.mask] = poison
    output, gradient = run(part, dirty, variant)
    assert torch.isfinite(output.values).all()
    assert all(torch.isfinite(value).all() for value in output.metrics.values())
    np.testing.assert_allclose(gradient, expected, **TOL)
    assert np.abs(expected).max() > 1e-4


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_fully_masked_micro_batch_gives_zero_with_a_graph(part, variant):
    case = Case(6)
    case.mask[:] = False
    case.w[:] = 0.0
    output, gradient = run(part, case, variant)
    assert output.values.requires_grad
    assert (output.values == 0).all()
    assert (gradient == 0).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_tokens_keep_the_graph_and_call_segments_as_often(part, variant):
    loss, options = VARIANTS[variant]
    policy_loss = part("slime.losses", loss, **options)
    calls = set()
    for lengths in [(5, 0, 7, 3, 1, 4, 6, 2), (0, 0), ()]:
        case = Case(7, lengths=lengths)
        segments = case.segments()
        leaf, inputs = case.inputs()
        output = policy_loss(inputs, segments)
        calls.add(segments.calls)
        assert output.values.shape == (sum(lengths),)
        assert output.values.requires_grad
        output.values.sum().backward()
        assert leaf.grad.shape == (sum(lengths),)
        assert torch.isfinite(leaf.grad).all()
    assert len(calls) == 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_zero_advantage_gives_exactly_zero(part, variant):
    case = Case(8)
    case.adv[:] = 0.0
    output, gradient = run(part, case, variant)
    assert (output.values == 0).all()
    assert (gradient == 0).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_extreme_log_ratios_stay_finite(part, variant):
    for sign in (1.0, -1.0):
        case = Case(9)
        case.lo = case.l - sign * 1e4
        output, gradient = run(part, case, variant, dtype=torch.float32)
        assert torch.isfinite(output.values).all()
        assert np.isfinite(gradient).all()
    # exp(20), not exp(10000): the clamp that every log-ratio goes through.
    if VARIANTS[variant][0] == "clip" and variant != "dual_clip":
        assert single(part, "clip", 1e4, -1.0)[0] == pytest.approx(math.exp(20.0), rel=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_stays_close_to_float64_and_keeps_its_dtype(part, variant):
    case = Case(10)
    exact, gradient = run(part, case, variant)
    single_precision, single_gradient = run(part, case, variant, dtype=torch.float32)
    assert single_precision.values.dtype == torch.float32
    assert all(value.dtype == torch.float32 for value in single_precision.metrics.values())
    np.testing.assert_allclose(single_precision.values.detach(), exact.values.detach(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(single_gradient, gradient, rtol=1e-4, atol=1e-6)
