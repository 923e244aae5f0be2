"""Loss weights: the aggregation of a step as one column, computed before its first micro-batch.

loss = sum over tokens of loss_weight x value, with loss_weight = mask x w / D. Nothing then depends on how the tokens
are split into micro-batches, ranks or packed streams.
"""

from __future__ import annotations

import numpy as np

from slime_core.contracts.aggregation import Aggregation
from slime_core.types.batch import Batch, Float32, Int64


def loss_weights(batch: Batch, step_of_sample: Int64, aggregation: Aggregation, max_response_len: int) -> Float32:
    """(M,) float32. step_of_sample: (S,), D is counted per step; max_response_len: L of the constant aggregation."""
    rollouts, rollout_of_sample = np.unique(batch.rollout_id, return_inverse=True)
    trainable_of_rollout = np.bincount(rollout_of_sample, weights=batch.num_trainable, minlength=len(rollouts))
    num_steps = int(step_of_sample.max(initial=-1)) + 1
    step_of_rollout = np.zeros(len(rollouts), np.int64)
    step_of_rollout[rollout_of_sample] = step_of_sample
    rollouts_in_step = np.bincount(step_of_rollout, minlength=num_steps)
    tokens_in_step = np.bincount(step_of_sample, weights=batch.num_trainable, minlength=num_steps)

    if aggregation is Aggregation.TOKEN_MEAN:
        of_sample = 1.0 / np.maximum(tokens_in_step, 1)[step_of_sample]
    elif aggregation is Aggregation.CONSTANT:
        of_sample = 1.0 / (max_response_len * rollouts_in_step[step_of_sample])
    else:
        of_sample = 1.0 / (np.maximum(trainable_of_rollout[rollout_of_sample], 1) * rollouts_in_step[step_of_sample])
    return batch.per_token(of_sample.astype(np.float32)) * batch.mask


def split_steps(batch: Batch, rollouts_per_step: int) -> Int64:
    """Returns the (S,) optimizer step of each sample: `rollouts_per_step` rollouts per step in order of appearance, all samples
    of a rollout in one step. The last step may be shorter."""
    _, first, rollout_of_sample = np.unique(batch.rollout_id, return_index=True, return_inverse=True)
    order = np.empty(len(first), np.int64)
    order[np.argsort(first)] = np.arange(len(first))
    return order[rollout_of_sample] // rollouts_per_step
