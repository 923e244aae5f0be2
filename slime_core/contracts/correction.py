"""OffPolicyCorrection: detached per-token weights and masks for the mismatch between trainer and engine.

Two stages. `batch`: from columns, over the whole optimizer step, on the driver (numpy). `loss`: where the current
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
    """Result of the batch stage, for M response tokens."""

    weights: Float32
    """(M,) factor of each token's loss."""
    keep: Bool
    """(M,) False: the token is masked."""
    metrics: Mapping[str, npt.NDArray[np.floating]] = field(default_factory=dict)
    """(M,) each, by name; averaged over the original masks, so that rejected tokens count too."""
    step_metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics that are no token means (extrema, means over sequences), one per step, over the original masks too."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossCorrection:
    """Result of the loss stage: float32 (T,) each, detached."""

    weights: Tensor
    """Factor of each token's loss; 0 masks the token."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Per token, by name; averaged like those of `BatchCorrection`."""


class OffPolicyCorrection(ABC):
    """Override the method of the stage that the driver declares."""

    def correct_batch(self, batch: Batch, columns: TokenColumns) -> BatchCorrection:
        """Called once per optimizer step. batch: all samples of the step; its `rollout_log_probs` are NaN unless
        ROLLOUT_LOGPROBS is a declared need. columns: the advantages, the returns and the declared needs."""
        raise TypeError(f"{type(self).__name__} has no batch stage")

    def correct_loss(self, inputs: LossInputs, segments: Segments) -> LossCorrection:
        """Called for each micro-batch. inputs: as of `PolicyLoss`; segments: reductions over its samples."""
        raise TypeError(f"{type(self).__name__} has no loss stage")


class CorrectionDriver(Driver[OffPolicyCorrection]):
    """Chosen by algo.corrections. `needs`: the columns that it reads."""

    needs: ClassVar[frozenset[Need]] = frozenset({Need.OLD_LOGPROBS, Need.ROLLOUT_LOGPROBS})
    in_loss: ClassVar[bool] = False
    """True: it needs the current log-probs, so it implements `correct_loss` instead of `correct_batch`."""
    compares_with_old: ClassVar[bool] = False
    """It weighs the ratio of current to old log-probs, so it has no effect where they are equal."""
