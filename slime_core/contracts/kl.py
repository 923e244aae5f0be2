"""KlEstimator: per-token estimate of KL(policy || reference) from two log-probs of the sampled token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from slime_core.contracts.driver import Driver

if TYPE_CHECKING:
    from torch import Tensor


class KlEstimator(ABC):
    """Pure; float32 or wider in and out, any shape."""

    @abstractmethod
    def __call__(self, log_probs: Tensor, ref_log_probs: Tensor, ratio: Tensor | None = None) -> Tensor:
        """Estimates in nats per token. ratio: exp(log_probs - old_log_probs), with gradient; it multiplies the estimate before
        any clamp, so that it is unbiased off-policy (`use_unbiased_kl`); None: not multiplied."""


class KlDriver(Driver[KlEstimator]):
    """Chosen by kl_loss_type and kl_reward_type."""

    never_negative: ClassVar[bool] = False
    """True: every estimate is at least 0, not only their mean."""
