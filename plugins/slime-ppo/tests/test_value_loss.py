"""The critic's loss against numbers worked by hand, a scalar float64 formula, and the kernel's own aggregation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slime_core.algorithm.loss import TokenObjective
from slime_core.contracts.loss import LossInputs
from slime_core.contracts.needs import Need
from slime_core.types.microbatch import LossColumns, MicroBatch
from slime_training.segments import LocalSegments


def inputs_of(values, old, returns, mask=None, dtype=torch.float64):
    leaf = torch.tensor(values, dtype=dtype, requires_grad=True)
    return leaf, LossInputs(
        mask=torch.ones(len(values), dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool),
        values=leaf,
        old_values=torch.tensor(old, dtype=dtype),
        returns=torch.tensor(returns, dtype=dtype),
    )


# old 0, clip 0.2. Value, return, loss, gradient: unmoved; within the clip; past it towards the return (clipped error
# (0.2 - 1)^2, no gradient); past it and away from the return; past the return itself (0.2 - 0.1 is the smaller error).
BY_HAND = [
    (0.0, 1.0, 1.0, -2.0),
    (0.1, 1.0, 0.81, -1.8),
    (0.5, 1.0, 0.64, 0.0),
    (-0.5, 1.0, 2.25, -3.0),
    (0.5, 0.1, 0.16, 0.8),
]


def test_numbers_by_hand(part):
    values, returns, losses, gradients = zip(*BY_HAND, strict=True)
    leaf, inputs = inputs_of(values, [0.0] * 5, returns)
    output = part("slime.losses", "value")(inputs, None)
    output.values.sum().backward()
    assert output.values.tolist() == pytest.approx(losses)
    assert leaf.grad.tolist() == pytest.approx(gradients)
    assert output.metrics["value_clipfrac"].tolist() == [0, 0, 1, 1, 1]


def test_without_a_clip_it_is_the_squared_error(part):
    values, returns, _, _ = zip(*BY_HAND, strict=True)
    leaf, inputs = inputs_of(values, [0.0] * 5, returns)
    output = part("slime.losses", "value", value_clip=None)(inputs, None)
    output.values.sum().backward()
    assert output.values.tolist() == pytest.approx([(v - r) ** 2 for v, r in zip(values, returns, strict=True)])
    assert leaf.grad.tolist() == pytest.approx([2 * (v - r) for v, r in zip(values, returns, strict=True)])
    assert not output.metrics["value_clipfrac"].any()


@pytest.mark.parametrize("value_clip", [0.05, 0.2, 1.0])
def test_equals_a_scalar_formula_and_its_differences(part, value_clip):
    rng = np.random.default_rng(3)
    values, old, returns = rng.normal(size=(3, 40)) * 0.5
    old = values - old * 0.3

    def formula(value, before, target):
        near = min(max(value, before - value_clip), before + value_clip)
        return max((near - target) ** 2, (value - target) ** 2)

    leaf, inputs = inputs_of(values, old, returns)
    output = part("slime.losses", "value", value_clip=value_clip)(inputs, None)
    output.values.sum().backward()
    rows = list(zip(values, old, returns, strict=True))
    np.testing.assert_allclose(output.values.detach(), [formula(*row) for row in rows], rtol=1e-12)
    h = 1e-6
    slopes = [(formula(v + h, o, r) - formula(v - h, o, r)) / (2 * h) for v, o, r in rows]
    np.testing.assert_allclose(leaf.grad, slopes, rtol=1e-5, atol=1e-5)


def test_masked_tokens_reach_nothing(part):
    mask = [1, 0, 0, 1]
    leaf, inputs = inputs_of([0.1, np.nan, 9.0, 0.4], [0.0, np.inf, 0.0, 0.0], [1.0, np.nan, np.inf, 0.0], mask)
    output = part("slime.losses", "value")(inputs, None)
    output.values.sum().backward()
    assert torch.isfinite(output.values).all()
    assert leaf.grad.tolist() == pytest.approx([-1.8, 0, 0, 0.8])
    assert output.metrics["value_clipfrac"].tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("count", [0, 3])
def test_no_trained_token_gives_a_zero_with_a_graph(part, count):
    leaf, inputs = inputs_of([0.5] * count, [0.0] * count, [1.0] * count, [0] * count)
    torch.where(inputs.mask, part("slime.losses", "value")(inputs, None).values, 0.0).sum().backward()
    assert leaf.grad.tolist() == [0.0] * count


def test_the_kernel_weighs_it_like_any_loss(part):
    """Three rollouts of 3, 0 and 2 tokens, one of them a tool's: each counts a third, and so each of the two trained
    tokens of a rollout a sixth."""
    values, old, returns = [0.0, 0.1, 5.0, -0.5, 0.5], [0.0] * 5, [1.0, 1.0, 9.0, 1.0, 0.1]
    mask = torch.tensor([1, 1, 0, 1, 1], dtype=torch.bool)
    segments = torch.tensor([0, 0, 0, 2, 2])
    none = torch.zeros(5, dtype=torch.int64)
    weight = torch.tensor([1 / 6, 1 / 6, 0, 1 / 6, 1 / 6])
    micro = MicroBatch(
        tokens=none, position_ids=none, cu_seqlens=torch.tensor([0, 3, 5], dtype=torch.int32), max_seqlen=3,
        logit_index=none, targets=none, segments=segments, num_samples=3, mask=mask,
        columns=LossColumns(values=torch.tensor(old), returns=torch.tensor(returns), loss_weight=weight),
    )  # fmt: skip
    objective = TokenObjective(
        loss=part("slime.losses", "value"), needs=frozenset({Need.VALUES}), reads_values=True, entropy_coef=0.0
    )
    result = objective(micro, segments=LocalSegments(segments, 3), values=torch.tensor(values, requires_grad=True))
    expected = (1.0 + 0.81 + 2.25 + 0.16) / 6
    assert result.loss.item() == pytest.approx(expected)
    sums = {name: float(value) for name, value in result.sums.items()}
    assert sums == pytest.approx({"loss": expected, "value_loss": expected, "value_clipfrac": 2 / 6})
