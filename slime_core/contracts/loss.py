"""PolicyLoss: one micro-batch in, per-token values out. The kernel weights and sums them.

Legend: T response tokens of the micro-batch, S samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

from slime_core.contracts.driver import Driver
from slime_core.contracts.needs import Need

if TYPE_CHECKING:
    from torch import Tensor


class Segments(Protocol):
    """Reductions over samples. One rank: plain torch; under context parallelism an all-reduce with autograd. How often
    a loss calls it may not depend on the data: ranks without tokens call it too."""

    @property
    def num_samples(self) -> int: ...

    def seq_sum(self, values: Tensor) -> Tensor:
        """(T,) to (S,): sums over each sample's tokens, over all ranks that hold a part of it."""

    def expand(self, values: Tensor) -> Tensor:
        """(S,) to (T,): each token gets its sample's value."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """float32 (T,) each. `log_probs` (or, for a critic, `values`) carries the gradient; everything else is constant.

    A tensor that the part did not declare among its needs is None.
    """

    mask: Tensor
    """bool"""
    log_probs: Tensor | None = None
    values: Tensor | None = None
    """Of a critic, under the weights being trained."""
    entropy: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    old_log_probs: Tensor | None = None
    old_values: Tensor | None = None
    ref_log_probs: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    teacher_log_probs: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossOutput:
    """`values` (T,), finite where the mask is 1 and anything finite elsewhere; `metrics` (T,), detached, reduced with
    the loss weights like the loss itself."""

    values: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


class PolicyLoss(ABC):
    """Pure and differentiable. Clamps log-ratios to [-20, 20] before any exp, selects with `where`, never multiplies by
    a mask, and knows neither rank nor micro-batch."""

    @abstractmethod
    def __call__(self, inputs: LossInputs, segments: Segments) -> LossOutput: ...


class LossDriver(Driver[PolicyLoss]):
    needs: ClassVar[frozenset[Need]] = frozenset({Need.OLD_LOGPROBS})
    uses_advantages: ClassVar[bool] = True
    """False: no advantages are computed and no reward is needed (supervised learning)."""
    sequence_level: ClassVar[bool] = False
    """Its ratio is one number for a whole sequence."""
    trains_values: ClassVar[bool] = False
    """It reads `values`, not `log_probs`: a critic's loss."""
