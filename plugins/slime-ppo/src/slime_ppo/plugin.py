"""Drivers of slime-ppo: the recipe, its advantage and the loss of its critic.

In the formulas e_k is the reward of trainable token k, V_k the critic's value of the state in which it was chosen, A_k
its advantage, R_k its return, rho_k = exp(l_k - old_k) the ratio of the trained to the old policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from slime_core.contracts.advantage import AdvantageDriver, AdvantageEstimator
from slime_core.contracts.aggregation import Aggregation
from slime_core.contracts.algorithm import Recipe
from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.loss import LossDriver, PolicyLoss
from slime_core.contracts.needs import Need

if TYPE_CHECKING:
    from slime_core.contracts.example import Example

PPO = Recipe(
    summary="The clipped policy gradient with a critic: the advantage of a token is how much its return exceeds the critic's "
    "prediction.",
    paper="Proximal Policy Optimization Algorithms, arXiv:1707.06347; advantages: High-Dimensional Continuous Control "
    "Using Generalized Advantage Estimation, arXiv:1506.02438",
    differences=(
        "a critic, a second model with a value head, is trained too: responses are not compared with each other as in "
        "group-relative methods, so one response per prompt is enough",
        "advantages differ from token to token: delta_k = e_k + gamma V_(k+1) - V_k, A_k = delta_k + gamma lambd A_(k+1)",
        "the KL to the reference can be a penalty on each token's reward (kl_coef, off by default)",
        "policy and critic are trained on the same advantages and returns, computed once from the values before the step",
    ),
    formula="policy: mean over rollouts of (1/M) sum_t max(-rho_t A_t, -clip(rho_t, 1 - eps_clip, 1 + eps_clip_high) A_t); "
    "critic: mean over rollouts of (1/M) sum_t max((V_t - R_t)^2, (clip(V_t, old_t - value_clip, old_t + value_clip) - "
    "R_t)^2), R_t = A_t + old_t",
    advantage="gae",
    loss="clip",
    aggregation=Aggregation.SEQ_MEAN,
    roles=("critic",),
    options={"critic_loss": "value", "kl_loss_type": "k3", "kl_reward_type": "k1"},
)


class GaeConfig(DriverConfig):
    gamma: float = Field(1.0, ge=0, le=1, allow_inf_nan=False)
    """Discount per trainable token. 1: the length of a response does not change its return."""
    lambd: float = Field(1.0, ge=0, le=1, allow_inf_nan=False)
    """1: return minus value, without bias; 0: only one step ahead, with the least variance."""


class Gae(AdvantageDriver):
    """Generalized advantages over trainable tokens: A_k = sum_j (gamma lambd)^j delta_(k+j)."""

    Config = GaeConfig
    needs = frozenset({Need.VALUES})
    accepts_kl_penalty = True
    accepts_spans = True

    @classmethod
    def build(cls, config: GaeConfig) -> AdvantageEstimator:
        from slime_ppo import gae

        return gae.Gae(gamma=config.gamma, lambd=config.lambd)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_ppo import examples

        return examples.GAE


class ValueConfig(DriverConfig):
    value_clip: float | None = Field(0.2, gt=0, allow_inf_nan=False)
    """A value that moved by more than this from the old one towards its return gets no gradient. In units of reward;
    none: off."""


class Value(LossDriver):
    """The critic's squared error, clipped around the old values: max((V - R)^2, (clip(V) - R)^2)."""

    Config = ValueConfig
    needs = frozenset({Need.VALUES})
    trains_values = True

    @classmethod
    def build(cls, config: ValueConfig) -> PolicyLoss:
        from slime_ppo import value_loss

        return value_loss.ValueLoss(config.value_clip)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_ppo import examples

        return examples.VALUE
