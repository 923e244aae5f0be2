"""Drivers of slime-grpo: five recipes, each described by its differences from the nearest relative, and their parts.

In the formulas r_i is the reward of sample i, rho_t = exp(l_t - old_t) the ratio of the trained to the old policy at
token t, A_t the advantage, M the number of trainable tokens of a rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from slime_core.contracts.advantage import AdvantageDriver, AdvantageEstimator, RewardShaper, ShapingDriver
from slime_core.contracts.aggregation import Aggregation
from slime_core.contracts.algorithm import Recipe
from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.loss import LossDriver, PolicyLoss

if TYPE_CHECKING:
    from slime_core.contracts.example import Example

# --- Recipes ----------------------------------------------------------------------------------------------------------

GRPO = Recipe(
    summary="PPO without a critic: a sample's advantage is its reward, normalized over the samples of the same prompt.",
    paper="DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models, arXiv:2402.03300",
    relative="ppo",
    differences=(
        "no critic: A_t = (r_i - mean) / (std + 1e-6) over the prompt's rollouts, the same for every token of a sample",
        "the KL to the reference is a term of the loss (kl_loss_coef, off by default), not a penalty on the reward",
        "the loss is averaged over each rollout's tokens first, then over rollouts",
    ),
    formula="mean over rollouts of (1/M) sum_t max(-rho_t A_t, -clip(rho_t, 1 - eps_clip, 1 + eps_clip_high) A_t)",
    advantage="group_norm",
    loss="clip",
    aggregation=Aggregation.SEQ_MEAN,
    options={"kl_loss_type": "k3"},
)

DR_GRPO = Recipe(
    summary="GRPO without its two normalizations, which favor long wrong responses and too easy or too hard prompts.",
    paper="Understanding R1-Zero-Like Training: A Critical Perspective, arXiv:2503.20783",
    relative="grpo",
    differences=(
        "A_t = r_i - mean: not divided by the group's standard deviation",
        "token sums are divided by the constant rollout_max_response_len, not by the length of each rollout",
    ),
    formula="mean over rollouts of (1/L) sum_t max(-rho_t A_t, -clip(rho_t, 1 - eps_clip, 1 + eps_clip_high) A_t), "
    "A_t = r_i - mean, L = rollout_max_response_len",
    advantage="group_norm",
    loss="clip",
    aggregation=Aggregation.CONSTANT,
    options={"disable_grpo_std_normalization": True, "kl_loss_type": "k3"},
)

DAPO = Recipe(
    summary="GRPO for long chains of thought: a higher upper clip, the same weight for every token, and new groups in place "
    "of groups without signal.",
    paper="DAPO: An Open-Source LLM Reinforcement Learning System at Scale, arXiv:2503.14476",
    relative="grpo",
    differences=(
        "clip higher: 1 + 0.28 above, 1 - 0.2 below, so that unlikely tokens can grow",
        "token_mean aggregation: tokens of long responses have the same weight as others",
        "dynamic sampling: the filter nonzero_std drops groups whose rewards are all equal",
        "no KL term",
        'soft overlong punishment is optional, shaping = ["overlong"]: its buffer of 4096 tokens requires a larger length '
        "limit",
    ),
    formula="mean over trainable tokens of max(-rho_t A_t, -clip(rho_t, 1 - 0.2, 1 + 0.28) A_t)",
    advantage="group_norm",
    loss="clip",
    aggregation=Aggregation.TOKEN_MEAN,
    filters=("nonzero_std",),
    options={"eps_clip": 0.2, "eps_clip_high": 0.28, "kl_loss_type": "k3"},
)

GSPO = Recipe(
    summary="GRPO with one ratio per sequence, the geometric mean of its tokens' ratios, because rewards are also "
    "per sequence.",
    paper="Group Sequence Policy Optimization, arXiv:2507.18071",
    relative="grpo",
    differences=(
        "the ratio is s_i = exp(mean over the sample's trainable tokens of (l_t - old_t)): whole samples are clipped",
        "much narrower clip, 1 - 3e-4 to 1 + 4e-4, since a mean of log-ratios varies much less than a single one",
    ),
    formula="mean over rollouts of (1/M) sum_t max(-s_i A_t, -clip(s_i, 1 - 3e-4, 1 + 4e-4) A_t), "
    "s_i = exp((1/M) sum_t (l_t - old_t))",
    advantage="group_norm",
    loss="sequence_clip",
    aggregation=Aggregation.SEQ_MEAN,
    options={"eps_clip": 3e-4, "eps_clip_high": 4e-4, "kl_loss_type": "k3"},
)

CISPO = Recipe(
    summary="GRPO that clips the weight of a token instead of its gradient: every token stays in the update.",
    paper="MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention, arXiv:2506.13585",
    relative="grpo",
    differences=(
        "REINFORCE with a clipped, constant importance weight: the gradient flows through l_t, not through the ratio",
        "no lower bound (eps_clip 1.0) and a high upper one (eps_clip_high 4.0)",
        'seq_mean like GRPO; the paper averages over tokens: aggregation = "token_mean"',
    ),
    formula="mean over rollouts of (1/M) sum_t -sg(clip(rho_t, 1 - 1.0, 1 + 4.0)) A_t l_t",
    advantage="group_norm",
    loss="cispo",
    aggregation=Aggregation.SEQ_MEAN,
    options={"eps_clip": 1.0, "eps_clip_high": 4.0, "kl_loss_type": "k3"},
)

# --- Advantage and reward shaping -------------------------------------------------------------------------------------


class GroupNormConfig(DriverConfig):
    disable_grpo_std_normalization: bool = False
    """Subtract the group's mean but do not divide by its standard deviation (Dr. GRPO)."""
    disable_rewards_normalization: bool = False
    """Do neither: the advantage is the reward itself. For rewards that are already relative to a baseline."""


class GroupNorm(AdvantageDriver):
    """A_t = (r_i - mean) / (std + 1e-6) over the rollouts with the same credit key; 0 for a group of one rollout."""

    Config = GroupNormConfig

    @classmethod
    def compares_group(cls, config: GroupNormConfig) -> bool:
        return not config.disable_rewards_normalization

    @classmethod
    def build(cls, config: GroupNormConfig) -> AdvantageEstimator:
        from slime_grpo import group_norm

        return group_norm.GroupNorm(
            subtract_mean=not config.disable_rewards_normalization,
            divide_by_std=not config.disable_grpo_std_normalization,
        )

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_grpo import examples

        return examples.GROUP_NORM


class OverlongConfig(DriverConfig):
    overlong_buffer_len: int = Field(4096, gt=0)
    """Tokens before rollout_max_response_len over which the penalty grows from 0 to its full size. Must be less than
    rollout_max_response_len; the default is the paper's, for a limit of 20480."""
    overlong_penalty_factor: float = Field(1.0, ge=0, allow_inf_nan=False)
    """Size of the full penalty, in units of reward."""


class Overlong(ShapingDriver):
    """DAPO's soft overlong punishment: a linear penalty for responses close to the length limit."""

    Config = OverlongConfig

    @classmethod
    def build(cls, config: OverlongConfig) -> RewardShaper:
        from slime_grpo import overlong

        return overlong.OverlongPenalty(
            buffer_len=config.overlong_buffer_len, penalty_factor=config.overlong_penalty_factor
        )

    @classmethod
    def problems(cls, config: OverlongConfig, max_response_len: int) -> list[str]:
        if config.overlong_buffer_len < max_response_len:
            return []
        return [
            f"algo.overlong_buffer_len = {config.overlong_buffer_len}: must be less than rollout.rollout_max_response_len = "
            f"{max_response_len}, or every response is penalized for its length. Set algo.overlong_buffer_len to a "
            f'part of it, such as {max(max_response_len // 5, 1)}, or take "overlong" out of algo.shaping.'
        ]

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_grpo import examples

        return examples.OVERLONG


# --- Losses -----------------------------------------------------------------------------------------------------------


class ClipConfig(DriverConfig):
    eps_clip: float = Field(0.2, gt=0, allow_inf_nan=False)
    """The ratio may fall to 1 - eps_clip before the gradient stops."""
    eps_clip_high: float | None = Field(None, gt=0, allow_inf_nan=False)
    """The ratio may rise to 1 + eps_clip_high before the gradient stops; unset: eps_clip."""
    eps_clip_c: float | None = Field(None, gt=1, allow_inf_nan=False)
    """Dual clip: where A < 0 the loss is at most -eps_clip_c x A, which bounds it for very large ratios. Unset: off; the
    paper uses 3."""


class Clip(LossDriver):
    """PPO's clipped surrogate, per token: max(-rho A, -clip(rho, 1 - eps_clip, 1 + eps_clip_high) A)."""

    Config = ClipConfig

    @classmethod
    def build(cls, config: ClipConfig) -> PolicyLoss:
        from slime_grpo import clip
        from slime_grpo.surrogate import ClipRange

        return clip.ClipLoss(ClipRange.around_one(config.eps_clip, config.eps_clip_high), config.eps_clip_c)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_grpo import examples

        return examples.CLIP


class SequenceClipConfig(DriverConfig):
    eps_clip: float = Field(3e-4, gt=0, allow_inf_nan=False)
    """Lower bound of the sequence ratio, see clip; 0.2 would almost never clip a mean log-ratio."""
    eps_clip_high: float | None = Field(4e-4, gt=0, allow_inf_nan=False)
    """Upper bound of the sequence ratio, see clip; None: eps_clip."""
    token_level: bool = False
    """GSPO-token: the same loss value, but each token's gradient is weighted with its own advantage. Differs only if
    advantages vary within a sample."""


class SequenceClip(LossDriver):
    """GSPO: the clipped surrogate with one ratio per sample, exp(mean of its log-ratios)."""

    Config = SequenceClipConfig
    sequence_level = True

    @classmethod
    def build(cls, config: SequenceClipConfig) -> PolicyLoss:
        from slime_grpo import sequence_clip
        from slime_grpo.surrogate import ClipRange

        return sequence_clip.SequenceClipLoss(
            ClipRange.around_one(config.eps_clip, config.eps_clip_high), config.token_level
        )

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_grpo import examples

        return examples.SEQUENCE_CLIP


class CispoConfig(DriverConfig):
    eps_clip: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Weights below 1 - eps_clip are raised to it; from 1.0 on there is no lower bound."""
    eps_clip_high: float | None = Field(4.0, gt=0, allow_inf_nan=False)
    """Weights above 1 + eps_clip_high are lowered to it; None: eps_clip."""


class Cispo(LossDriver):
    """REINFORCE with a clipped importance weight: -sg(clip(rho, 1 - eps_clip, 1 + eps_clip_high)) A l."""

    Config = CispoConfig

    @classmethod
    def build(cls, config: CispoConfig) -> PolicyLoss:
        from slime_grpo import cispo
        from slime_grpo.surrogate import ClipRange

        return cispo.CispoLoss(ClipRange.around_one(config.eps_clip, config.eps_clip_high))

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_grpo import examples

        return examples.CISPO
