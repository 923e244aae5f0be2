"""Drivers of slime-reinforce: three recipes, each described by its differences from the nearest relative, and their
advantage estimators.

In the formulas r_i is the reward of sample i, k_t the estimated KL to the reference at token t, rho_t = exp(l_t - old_t)
the ratio of the trained to the old policy, A_t the advantage, M the number of trainable tokens of a rollout.
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

if TYPE_CHECKING:
    from slime_core.contracts.example import Example

# --- Recipes ----------------------------------------------------------------------------------------------------------

REINFORCE_PLUS_PLUS = Recipe(
    summary="PPO without a critic: a token's advantage is its discounted return, whitened over the whole batch.",
    paper="REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization, arXiv:2501.03262",
    relative="ppo",
    differences=(
        "no critic: A_t is the return G_t = e_t + gamma G_(t+1), with the reward in e at the last trainable token",
        "advantages are whitened over the trainable tokens of the whole batch, not compared within a prompt: one sample "
        "per prompt is enough",
        "as in PPO the KL to the reference is a penalty on each token's reward (kl_coef, off by default)",
    ),
    formula="mean over rollouts of (1/M) sum_t max(-rho_t A_t, -clip(rho_t, 1 - eps_clip, 1 + eps_clip_high) A_t), "
    "A = whitened G, G_t = sum_(s >= t) gamma^(s - t) (r_i [s is the last] - kl_coef k_s)",
    advantage="discounted_return",
    loss="clip",
    aggregation=Aggregation.SEQ_MEAN,
    options={"normalize_advantages": True, "kl_reward_type": "k1", "kl_loss_type": "k3"},
)

REINFORCE_PLUS_PLUS_BASELINE = Recipe(
    summary="REINFORCE++ with the mean reward of the prompt's rollouts as a baseline.",
    paper="REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization, arXiv:2501.03262",
    relative="reinforce_plus_plus",
    differences=(
        "A_t = r_i - mean over the prompt's rollouts, before whitening; no standard deviation of the group",
        "no discounting: a KL penalty only counts at its own token",
    ),
    formula="mean over rollouts of (1/M) sum_t max(-rho_t A_t, -clip(rho_t, 1 - eps_clip, 1 + eps_clip_high) A_t), "
    "A = whitened (r_i - mean - kl_coef k_t)",
    advantage="group_baseline",
    loss="clip",
    aggregation=Aggregation.SEQ_MEAN,
    options={"normalize_advantages": True, "kl_reward_type": "k1", "kl_loss_type": "k3"},
)

RLOO = Recipe(
    summary="GRPO with a baseline that leaves out the sample itself, so it is unbiased; no standard deviation.",
    paper="Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs, "
    "arXiv:2402.14740",
    relative="grpo",
    differences=(
        "A_t = r_i - mean over the other rollouts of the prompt, not divided by a standard deviation",
        "PPO's clip per token, which has no effect with one optimizer step per rollout batch; the paper has none",
        "the KL to the reference is a term of the loss, as in GRPO; the paper subtracts it from the reward",
        'seq_mean like GRPO; the paper sums over tokens, which is aggregation = "constant" up to a factor',
    ),
    formula="mean over rollouts of (1/M) sum_t max(-rho_t A_t, -clip(rho_t, 1 - eps_clip, 1 + eps_clip_high) A_t), "
    "A_t = r_i - mean of r_j over j != i",
    advantage="leave_one_out",
    loss="clip",
    aggregation=Aggregation.SEQ_MEAN,
    options={"kl_loss_type": "k3"},
)

# --- Advantages -------------------------------------------------------------------------------------------------------


class DiscountedReturnConfig(DriverConfig):
    gamma: float = Field(1.0, ge=0, le=1, allow_inf_nan=False)
    """Discount per trainable token: a reward k tokens later counts gamma^k. 1: every token gets the sum of all later
    rewards."""


class DiscountedReturn(AdvantageDriver):
    """G_t = e_t + gamma G_(t+1) over trainable tokens; e is -kl_coef k_t, plus the reward at the last of them."""

    Config = DiscountedReturnConfig
    accepts_kl_penalty = True
    accepts_spans = True

    @classmethod
    def build(cls, config: DiscountedReturnConfig) -> AdvantageEstimator:
        from slime_reinforce import discounted_return

        return discounted_return.DiscountedReturn(gamma=config.gamma)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_reinforce import examples

        return examples.DISCOUNTED_RETURN


class BaselineConfig(DriverConfig):
    disable_rewards_normalization: bool = False
    """Use no baseline: the advantage is the reward itself. For rewards that are already relative to a baseline."""


class BaselineDriver(AdvantageDriver):
    """Base of the two drivers with a baseline per prompt."""

    Config = BaselineConfig

    @classmethod
    def compares_group(cls, config: BaselineConfig) -> bool:
        return not config.disable_rewards_normalization


class GroupBaseline(BaselineDriver):
    """A_t = r_i - mean over the rollouts with the same credit key, minus kl_coef k_t; then whitened."""

    accepts_kl_penalty = True

    @classmethod
    def build(cls, config: BaselineConfig) -> AdvantageEstimator:
        from slime_reinforce import group_baseline

        return group_baseline.GroupBaseline(subtract_mean=not config.disable_rewards_normalization)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_reinforce import examples

        return examples.GROUP_BASELINE


class LeaveOneOut(BaselineDriver):
    """A_t = r_i - mean over the other rollouts with the same credit key; 0 for a group of one rollout."""

    @classmethod
    def build(cls, config: BaselineConfig) -> AdvantageEstimator:
        from slime_reinforce import leave_one_out

        return leave_one_out.LeaveOneOut(subtract_mean=not config.disable_rewards_normalization)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_reinforce import examples

        return examples.LEAVE_ONE_OUT
