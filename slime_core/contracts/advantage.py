"""AdvantageEstimator: rewards and scores of the whole batch in, per-token advantages out. RewardShaper: before it.

Both are pure functions, run once on the driver over the whole batch: they see no process group and no micro-batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from slime_core.contracts.driver import Driver
from slime_core.contracts.needs import Need

if TYPE_CHECKING:
    from slime_core.types.batch import Batch, Float32, Float64, TokenColumns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CreditInputs:
    """S samples, M response tokens. Columns that were not declared as needs are None."""

    batch: Batch
    rewards: Float64
    """(S,) after shaping; NaN: no reward."""
    columns: TokenColumns
    kl_penalty: Float32 | None
    """(M,) kl_coef x k(old, ref), 0 at masked tokens; None when kl_coef is 0, and for what is added to an advantage."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Credit:
    """What an estimator returns. Masked tokens may hold anything finite: they are never read."""

    advantages: Float32
    """(M,)"""
    returns: Float32 | None = None
    """(M,) targets for a critic; None: the advantages."""
    sample_credit: Float64 | None = None
    """(S,) the number each sample was credited with, logged as `rollout/rewards`."""
    metrics: Mapping[str, float] = field(default_factory=dict)


class AdvantageEstimator(ABC):
    """Pure. Must give zero where all rewards of a comparison are equal, and never raise on an empty response, a fully
    masked sample or a group of one."""

    @abstractmethod
    def estimate(self, inputs: CreditInputs) -> Credit: ...


class AdvantageDriver(Driver[AdvantageEstimator]):
    needs: ClassVar[frozenset[Need]] = frozenset()
    uses_rewards: ClassVar[bool] = True
    """False: its signal is elsewhere, so that a run needs no reward for it."""
    accepts_kl_penalty: ClassVar[bool] = False
    """Whether a reward-side KL (kl_coef) enters it; if not, asking for one is a config error."""
    accepts_spans: ClassVar[bool] = False
    """Whether it credits rewards of spans where they were earned (`Batch.token_reward`); if not, they are a config error."""

    @classmethod
    def compares_group(cls, config: Any) -> bool:
        """Whether it compares samples of one prompt, so that one sample per prompt gives no signal."""
        return False


class RewardShaper(ABC):
    """Changes rewards before the advantage: overlong penalties and the like. Pure."""

    @abstractmethod
    def shape(self, rewards: Float64, batch: Batch, max_response_len: int) -> Float64:
        """(S,) in, (S,) out; NaN stays NaN."""


class ShapingDriver(Driver[RewardShaper]):
    """Registered in slime.advantages too; named in `algo.shaping`, in order."""
