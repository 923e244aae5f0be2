"""Six samples with every awkward shape, their log-probs, and the way from a correction to gradients."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from slime_core.algorithm.advantages import AdvantageConfig, compute_advantages_and_returns
from slime_core.algorithm.loss import TokenObjective
from slime_core.algorithm.packing import pack_micro_batch
from slime_core.contracts.aggregation import Aggregation
from slime_core.contracts.loss import LossOutput, PolicyLoss
from slime_core.types.batch import Batch, TokenColumns
from slime_training.segments import LocalSegments

# Sample 2 is empty, 4 fully masked, 1 and 3 hold tool tokens; 0 and 1 are one rollout.
LENGTHS = [(3, 5), (2, 3), (1, 0), (4, 6), (2, 4), (1, 1)]
MASKS = [[1] * 5, [1, 0, 1], [], [1, 1, 0, 0, 1, 1], [0] * 4, [1]]
ROLLOUT = [0, 0, 1, 2, 3, 4]
ADVANTAGE = [1.5, -0.5, 2.0, -1.0, 0.7, -2.0]
WHOLE = [[0, 1, 2, 3, 4, 5]]
SPLITS = {
    "whole": WHOLE,
    "three uneven": [[0, 1, 2], [3], [4, 5]],
    "one sample each": [[n] for n in range(6)],
    "torn apart, reversed": [[5, 1], [4], [], [3, 0, 2]],
}


def build_batch(rollout_log_probs):
    prompt, response = (np.array([pair[side] for pair in LENGTHS], np.int32) for side in (0, 1))
    return Batch(
        index=np.arange(6),
        group_index=np.zeros(6, np.int64),
        rollout_id=np.array(ROLLOUT),
        credit_key=np.zeros(6, np.int64),
        reward=np.array(ADVANTAGE),
        truncated=np.zeros(6, np.bool_),
        prompt_length=prompt,
        response_length=response,
        tokens=np.arange(prompt.sum() + response.sum(), dtype=np.int32),
        mask=np.array([bit for mask in MASKS for bit in mask], np.uint8),
        rollout_log_probs=rollout_log_probs.astype(np.float32),
        version=np.zeros(response.sum(), np.int32),
    )


@dataclass(frozen=True)
class Scene:
    """Log-probs in float64 that float32 holds exactly, a row for each sample; and what the code is given of them."""

    current: list[np.ndarray]
    old: list[np.ndarray]
    rollout: list[np.ndarray]
    garbage: bool = False
    """NaN and inf at masked tokens."""
    flat_mask: np.ndarray = field(default_factory=lambda: np.array([bit for mask in MASKS for bit in mask], bool))

    def flat(self, name):
        values = np.concatenate(getattr(self, name))
        if self.garbage:
            values = np.where(self.flat_mask, values, {"current": np.nan, "old": -np.inf, "rollout": np.inf}[name])
        return values

    @property
    def batch(self):
        return build_batch(self.flat("rollout"))

    @property
    def columns(self):
        advantages = np.concatenate([np.full(r, a) for (_, r), a in zip(LENGTHS, ADVANTAGE, strict=True)])
        return TokenColumns(old_log_probs=self.flat("old").astype(np.float32), advantages=advantages.astype(np.float32))


def make_scene(*, gap=0.8, move=0.4, seed=2, **changes):
    """`gap`: between trainer and engine; `move`: between the current and the old policy, in nats per token."""
    rng = np.random.default_rng(seed)
    old = [rng.normal(-2, 0.6, r) for _, r in LENGTHS]
    rows = {
        "old": old,
        "rollout": [values - gap * rng.normal(size=len(values)) for values in old],
        "current": [values + move * rng.normal(size=len(values)) for values in old],
    }
    exact = {name: [v.astype(np.float32).astype(np.float64) for v in of_name] for name, of_name in rows.items()}
    return Scene(**exact, **changes)


class Reinforce(PolicyLoss):
    """-A l: its gradient is -A, so that what a correction does to it can be read off."""

    def __call__(self, inputs, segments):
        advantages = torch.where(inputs.mask, inputs.advantages, 0.0)
        return LossOutput(values=-advantages * torch.where(inputs.mask, inputs.log_probs, 0.0))


def loss_weights(aggregation=Aggregation.SEQ_MEAN):
    """Per sample; D and lengths are those of the original masks, whatever a correction takes out."""
    trained = [sum(mask) for mask in MASKS]
    if aggregation is Aggregation.TOKEN_MEAN:
        return [1 / sum(trained)] * 6
    of_rollout = [sum(trained[s] for s in range(6) if ROLLOUT[s] == ROLLOUT[n]) for n in range(6)]
    return [1 / max(length, 1) / 5 for length in of_rollout]


def train(scene, driver, options, *, splits=WHOLE, order=None, aggregation=Aggregation.SEQ_MEAN, skip_old=False):
    """The gradient by each token's log-prob (a row per sample), and the metrics of the step."""
    config = driver.Config(**options)
    order = list(range(6)) if order is None else order
    batch, rows = scene.batch.take(np.array(order)), scene.batch.response_rows(np.array(order))
    columns = scene.columns.take(rows)
    part = (driver.build(config), frozenset(driver.needs))
    rules = AdvantageConfig(
        advantage=None,
        corrections=[] if driver.in_loss else [part],
        aggregation=aggregation,
        rollouts_per_step=5,
        max_response_len=8,
    )
    credited = compute_advantages_and_returns(batch, columns, rules)
    columns = replace(credited.columns, old_log_probs=None) if skip_old else credited.columns
    objective = TokenObjective(
        loss=Reinforce(),
        needs=frozenset(),
        report_entropy=False,
        old_from_current=skip_old,
        corrections=[part] if driver.in_loss else [],
    )
    leaf = torch.tensor(scene.flat("current")[rows], requires_grad=True)
    metrics = dict(credited.step_metrics[0])
    for samples in splits:
        chosen = np.array([order.index(n) for n in samples], np.int64)
        micro = pack_micro_batch(batch, chosen, columns=columns)
        segments = LocalSegments(micro.segments, micro.num_samples)
        output = objective(micro, segments=segments, log_probs=leaf[torch.from_numpy(batch.response_rows(chosen))])
        output.loss.backward()
        for name, value in output.sums.items():
            assert not value.requires_grad
            metrics[name] = metrics.get(name, 0.0) + float(value)
    gradient = np.empty(len(rows))
    gradient[rows] = leaf.grad.numpy()
    return np.split(gradient, np.cumsum([r for _, r in LENGTHS])[:-1]), metrics


def expected_gradient(weights, aggregation=Aggregation.SEQ_MEAN):
    """Of Reinforce, with these weights (a row per sample; 0: left out)."""
    per_sample = loss_weights(aggregation)
    return [
        np.array([-ADVANTAGE[n] * per_sample[n] * w * bit for w, bit in zip(weights[n], MASKS[n], strict=True)])
        for n in range(6)
    ]


def assert_same(got, expected, tolerance=2e-6):
    for n in range(6):
        np.testing.assert_allclose(got[n], expected[n], rtol=tolerance, atol=1e-12, err_msg=f"sample {n}")
