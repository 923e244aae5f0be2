"""KL(policy || reference) from the log-probs of the sampled token, d = l - ref, in nats per token, any shape.

Source: J. Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html. `ratio` is the
importance weight of "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models", arXiv:2512.02556, which makes
the estimate unbiased for tokens that older weights sampled. The caller keeps masked tokens out: what goes in is finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slime_core.contracts.kl import KlEstimator

MAX_LOG_RATIO = 20.0
MAX_LOW_VAR_KL = 10.0


class K1(KlEstimator):
    """d."""

    def __call__(self, log_probs: Tensor, ref_log_probs: Tensor, ratio: Tensor | None = None) -> Tensor:
        return _weighted(log_probs - ref_log_probs, ratio)


class K2(KlEstimator):
    """d^2 / 2."""

    def __call__(self, log_probs: Tensor, ref_log_probs: Tensor, ratio: Tensor | None = None) -> Tensor:
        return _weighted((log_probs - ref_log_probs).square() / 2, ratio)


class K3(KlEstimator):
    """exp(-d) - 1 + d with d in [-20, 20]; beyond, the value stays and the gradient is zero."""

    def __call__(self, log_probs: Tensor, ref_log_probs: Tensor, ratio: Tensor | None = None) -> Tensor:
        # Both terms take the clamped d: with d < -20 in the linear term alone, descent would push l further down.
        clamped = (log_probs - ref_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        # expm1, since exp(-d) - 1 in float32 is off by 6e-8, more than the whole estimate for |d| < 3e-4.
        return _weighted(torch.expm1(-clamped) + clamped, ratio)


class LowVarKl(K3):
    """k3, times the ratio, then clamped to [-10, 10]."""

    def __call__(self, log_probs: Tensor, ref_log_probs: Tensor, ratio: Tensor | None = None) -> Tensor:
        return super().__call__(log_probs, ref_log_probs, ratio).clamp(-MAX_LOW_VAR_KL, MAX_LOW_VAR_KL)


def _weighted(estimate: Tensor, ratio: Tensor | None) -> Tensor:
    return estimate if ratio is None else ratio * estimate
