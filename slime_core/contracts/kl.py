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
        """Nats per token. `ratio` (exp(l - old), with gradient) multiplies the estimate before any clamp, which makes
        it unbiased off-policy (`use_unbiased_kl`)."""


class KlDriver(Driver[KlEstimator]):
    """Chosen by kl_loss_type and kl_reward_type."""

    never_negative: ClassVar[bool] = False
    """Not only its average, each estimate is 0 or more."""
