"""Mismatch between the log-probs of engine and trainer, for the same tokens under the same weights.

x = log-prob of the trainer - log-prob of the engine, in nats, at trained tokens; the engine sampled. All in float64.
Legend: M response tokens, S samples.
"""

from __future__ import annotations

import numpy as np

from slime_core.types.batch import Batch, Float32, Float64

MAX_LOG_RATIO = 20.0


def mismatch_metrics(batch: Batch, log_probs: Float32) -> dict[str, float]:
    """Mismatch metrics of one optimizer step. batch: its samples; log_probs: (M,) the trainer's.

    Means are over trained tokens (mis_kl, mis_k3_kl, mis_chi2_token, train_rollout_logprob_abs_diff) or over samples
    that have any (the others); arguments of exp are clamped to [-20, 20]. Empty if no token is trained.
    """
    trained = batch.mask.astype(np.bool_)
    counts = batch.num_trainable[batch.num_trainable > 0]
    if not len(counts):
        return {}
    trainer = log_probs[trained].astype(np.float64)
    engine = batch.rollout_log_probs[trained].astype(np.float64)
    gap = trainer - engine
    bounded = clamped(gap)
    starts = np.cumsum(counts) - counts
    sum_S = np.add.reduceat(gap, starts)
    trainer_log_ppl_S = -np.add.reduceat(trainer, starts) / counts
    engine_log_ppl_S = -np.add.reduceat(engine, starts) / counts
    log_ppl_diff_S = trainer_log_ppl_S - engine_log_ppl_S
    return {
        "train_rollout_logprob_abs_diff": float(np.abs(gap).mean()),
        # Both estimate KL(engine || trainer); the second is never negative (J. Schulman, "Approximating KL Divergence").
        "mis_kl": float(-gap.mean()),
        "mis_k3_kl": float((np.expm1(bounded) - bounded).mean()),
        "mis_ratio_max": float(np.exp(clamped(gap.max()))),
        "mis_ratio_min": float(np.exp(clamped(gap.min()))),
        # The chi-squared divergence is the variance of the ratio: E[ratio^2] - 1.
        "mis_chi2_token": float(np.expm1(clamped(2 * gap)).mean()),
        "mis_chi2_seq": float(np.expm1(clamped(2 * sum_S)).mean()),
        "mis_training_log_ppl": float(trainer_log_ppl_S.mean()),
        "mis_rollout_log_ppl": float(engine_log_ppl_S.mean()),
        "mis_training_ppl": float(np.exp(clamped(trainer_log_ppl_S)).mean()),
        "mis_rollout_ppl": float(np.exp(clamped(engine_log_ppl_S)).mean()),
        "mis_log_ppl_diff": float(log_ppl_diff_S.mean()),
        "mis_log_ppl_abs_diff": float(np.abs(log_ppl_diff_S).mean()),
        "mis_ppl_ratio": float(np.exp(clamped(log_ppl_diff_S)).mean()),
    }


def clamped(exponent: Float64) -> Float64:
    return np.clip(exponent, -MAX_LOG_RATIO, MAX_LOG_RATIO)
