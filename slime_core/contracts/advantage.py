"""AdvantageEstimator: per-token advantages from the rewards and token columns of a batch. RewardShaper: runs before it.

Both are pure functions that the driver calls once per batch: they see no process group and no micro-batch.
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
    """Inputs of an estimator. `batch`: the S samples of the step, with M response tokens."""

    batch: Batch
    rewards: Float64
    """(S,) after shaping; NaN: no reward."""
    columns: TokenColumns
    """(M,) each: the columns declared in `AdvantageDriver.needs`; the others are None."""
    kl_penalty: Float32 | None
    """(M,) nats: kl_coef x k(old, ref), 0 at masked tokens; None if kl_coef is 0, and for terms added to an advantage."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Credit:
    """Result of an estimator; masked tokens are not read, but finite. `metrics`: of the whole batch, to log by name."""

    advantages: Float32
    """(M,)"""
    returns: Float32 | None = None
    """(M,) value targets of a critic; None: the advantages."""
    sample_credit: Float64 | None = None
    """(S,) the reward each sample is credited with, logged as `rollout/rewards`; None: not logged."""
    metrics: Mapping[str, float] = field(default_factory=dict)


class AdvantageEstimator(ABC):
    """Pure. 0 where all compared rewards are equal; never raises on empty or masked responses or a group of one."""

    @abstractmethod
    def estimate(self, inputs: CreditInputs) -> Credit:
        """Computes the advantages of the whole batch; finite at every trained token."""


class AdvantageDriver(Driver[AdvantageEstimator]):
    """Chosen by algo.advantage. Class attributes declare what the estimator reads and accepts."""

    needs: ClassVar[frozenset[Need]] = frozenset()
    """Columns of `CreditInputs.columns` that the kernel computes for it."""
    uses_rewards: ClassVar[bool] = True
    """False: the estimator reads no rewards, so the run needs no reward function for it."""
    accepts_kl_penalty: ClassVar[bool] = False
    """True: it reads `CreditInputs.kl_penalty`. If False, kl_coef other than 0 is a config error."""
    accepts_spans: ClassVar[bool] = False
    """True: it credits span rewards at their tokens (`Batch.token_reward`). If False, a reward with spans is a config error."""

    @classmethod
    def compares_group(cls, config: Any) -> bool:
        """True if it compares samples of one prompt, so that one sample per prompt gives no signal."""
        return False


class RewardShaper(ABC):
    """Changes rewards before the advantage: overlong penalties and the like. Pure."""

    @abstractmethod
    def shape(self, rewards: Float64, batch: Batch, max_response_len: int) -> Float64:
        """Returns the shaped rewards (S,). rewards: (S,), NaN where a sample has none, which stays; max_response_len: limit
        of the response in tokens (`rollout_max_response_len`)."""


class ShapingDriver(Driver[RewardShaper]):
    """Registered in slime.advantages too; named in `algo.shaping`, in order."""

    @classmethod
    def problems(cls, config: Any, max_response_len: int) -> list[str]:
        """Conflicts of its options with the limit of the response in tokens; empty if there are none."""
        return []
