"""PolicyLoss: per-token losses of a micro-batch of T response tokens, S samples; the kernel weights and sums them."""

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
    """Reductions over samples. One rank: plain torch; under context parallelism an all-reduce with autograd. The
    number of calls may not depend on the data: ranks without tokens must call it too."""

    @property
    def num_samples(self) -> int:
        """S, the samples of the micro-batch, also those without tokens on this rank; 0 in a dummy micro-batch."""

    def seq_sum(self, values: Tensor) -> Tensor:
        """(T,) to (S,): sums `values` over each sample's tokens, on all ranks that hold a part of it."""

    def expand(self, values: Tensor) -> Tensor:
        """(S,) to (T,): each token gets its sample's value."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """float32 (T,) each, in nats; None: not declared as a need (see `Need`). `old_*`: before this rollout's training.

    `log_probs`, `entropy` and `values` may carry gradient; the others are constant. `returns` are a critic's targets.
    """

    mask: Tensor
    """bool, True: trained token."""
    log_probs: Tensor | None = None
    """Under the weights being trained; None for a critic."""
    values: Tensor | None = None
    """Of a critic, under the weights being trained; None for a policy."""
    entropy: Tensor | None = None
    """Of the whole distribution, under the weights being trained."""
    advantages: Tensor | None = None
    """None: the loss uses no advantages."""
    returns: Tensor | None = None
    old_log_probs: Tensor | None = None
    old_values: Tensor | None = None
    ref_log_probs: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    teacher_log_probs: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossOutput:
    """`values`: (T,) losses, finite everywhere. `metrics`: (T,) detached, reduced with the loss weights like the loss."""

    values: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


class PolicyLoss(ABC):
    """Pure, differentiable. Clamps log-ratios to [-20, 20] before exp; selects with `where`, never multiplies by a mask."""

    @abstractmethod
    def __call__(self, inputs: LossInputs, segments: Segments) -> LossOutput:
        """Computes the losses of one micro-batch. segments: reductions over its samples."""


class LossDriver(Driver[PolicyLoss]):
    """Chosen by algo.loss. `needs`: the columns that it reads."""

    needs: ClassVar[frozenset[Need]] = frozenset({Need.OLD_LOGPROBS})
    uses_advantages: ClassVar[bool] = True
    """False: no advantages are computed and no reward is needed (supervised learning)."""
    sequence_level: ClassVar[bool] = False
    """True: its ratio is one number per sequence."""
    regularized: ClassVar[bool] = False
    """True: its gradient is not 0 where advantages are, such as by a penalty on the log-ratio."""
    trains_values: ClassVar[bool] = False
    """True: it is a critic's loss, which reads `values` instead of `log_probs`."""
