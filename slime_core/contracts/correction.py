"""OffPolicyCorrection: detached per-token weights and masks for the gap between trainer and engine.

Two stages. `batch`: from columns, over the whole optimiser step, on the driver (numpy). `loss`: where the current
log-probs are needed, inside the objective (torch, with `Segments`). Denominators keep the original masks.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from slime_core.contracts.driver import Driver
from slime_core.contracts.needs import Need

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from slime_core.contracts.loss import LossInputs, Segments
    from slime_core.types.batch import Batch, Bool, Float32, TokenColumns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchCorrection:
    """(M,) each. `keep` False masks the token."""

    weights: Float32
    keep: Bool
    metrics: Mapping[str, npt.NDArray[np.floating]] = field(default_factory=dict)
    """Per token; averaged over the original masks, so that a rejection cannot hide itself."""
    step_metrics: Mapping[str, float] = field(default_factory=dict)
    """What is no mean over tokens (extrema, means over sequences), of the step, over the original masks too."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossCorrection:
    """(T,) each, detached."""

    weights: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


class OffPolicyCorrection(ABC):
    """Override the method of the stage that the driver declares."""

    def correct_batch(self, batch: Batch, columns: TokenColumns) -> BatchCorrection:
        """Called once for each optimiser step, with all of its samples. `columns` holds the advantages, the returns and
        the declared needs; without ROLLOUT_LOGPROBS among these, the batch's are NaN."""
        raise TypeError(f"{type(self).__name__} has no batch stage")

    def correct_loss(self, inputs: LossInputs, segments: Segments) -> LossCorrection:
        raise TypeError(f"{type(self).__name__} has no loss stage")


class CorrectionDriver(Driver[OffPolicyCorrection]):
    needs: ClassVar[frozenset[Need]] = frozenset({Need.OLD_LOGPROBS, Need.ROLLOUT_LOGPROBS})
    in_loss: ClassVar[bool] = False
    """It needs the current log-probs, so it runs inside the loss."""
    compares_with_old: ClassVar[bool] = False
    """It weighs how far the current log-probs are from the old ones, so it can do nothing where they are equal."""
