"""Drivers of slime-distill: on-policy distillation and supervised fine-tuning, and their parts.

In the formulas l_t is the log-prob of token t under the weights being trained, old_t before this rollout's training,
teacher_t under the teacher; rho_t = exp(l_t - old_t); A_t the advantage; M the number of trainable tokens of a rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from slime_core.contracts.advantage import AdvantageDriver, AdvantageEstimator
from slime_core.contracts.aggregation import Aggregation
from slime_core.contracts.algorithm import Recipe
from slime_core.contracts.collector import Collector, CollectorDriver
from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.example import CollectorExample
from slime_core.contracts.loss import LossDriver, PolicyLoss
from slime_core.contracts.needs import Need

if TYPE_CHECKING:
    from slime_core.config.rollout import RolloutConfig
    from slime_core.contracts.example import Example
    from slime_core.rollout.context import RolloutContext

# --- Recipes ----------------------------------------------------------------------------------------------------------

OPD = Recipe(
    summary="On-policy distillation: the student generates, and a teacher computes the log-prob of each of its tokens; no "
    "reward is needed.",
    paper="On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes, arXiv:2306.13649",
    relative="grpo",
    differences=(
        "A_t = -opd_kl_coef (old_t - teacher_t), one estimate of the reverse KL for each token, instead of the rollout's "
        "normalized reward",
        "no group: one sample per prompt is enough",
        "every token has the same weight (token_mean), since each has its own signal",
        "a policy gradient with PPO's clip on the reverse KL at the sampled tokens; the paper differentiates a divergence "
        "of whole distributions",
    ),
    formula="mean over trainable tokens of max(-rho_t A_t, -clip(rho_t, 1 - eps_clip, 1 + eps_clip_high) A_t), "
    "A_t = -opd_kl_coef (old_t - teacher_t)",
    advantage="reverse_kl",
    loss="clip",
    aggregation=Aggregation.TOKEN_MEAN,
    options={"kl_loss_type": "k3"},
)

SFT = Recipe(
    summary="Supervised fine-tuning: maximizes the likelihood of the responses in the data; nothing is generated.",
    paper="Training language models to follow instructions with human feedback, arXiv:2203.02155, step 1",
    differences=(
        "no advantages, no old log-probs, no reward and no engine (evaluation sets start one)",
        "responses come from the data: the assistant's turns of a conversation, through the chat template, or a label",
        "log-probs at temperature 1, for any rollout temperature",
    ),
    formula="mean over trainable tokens of -l_t",
    advantage=None,
    loss="sft",
    aggregation=Aggregation.TOKEN_MEAN,
    collector="sft",
)

# --- Advantage --------------------------------------------------------------------------------------------------------


class ReverseKlConfig(DriverConfig):
    opd_kl_coef: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Weight of the teacher. As a term of another advantage: how many of its units one nat counts."""


class ReverseKl(AdvantageDriver):
    """A_t = -opd_kl_coef (old_t - teacher_t) at each token that the student sampled."""

    Config = ReverseKlConfig
    needs = frozenset({Need.OLD_LOGPROBS, Need.TEACHER_LOGPROBS})
    uses_rewards = False

    @classmethod
    def build(cls, config: ReverseKlConfig) -> AdvantageEstimator:
        from slime_distill import reverse_kl

        return reverse_kl.ReverseKl(config.opd_kl_coef)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_distill import examples

        return examples.REVERSE_KL


# --- Loss -------------------------------------------------------------------------------------------------------------


class Sft(LossDriver):
    """-l_t: the negative log-likelihood of each trained token."""

    needs = frozenset()
    uses_advantages = False

    @classmethod
    def build(cls, config: DriverConfig) -> PolicyLoss:
        from slime_distill import likelihood

        return likelihood.NegativeLogLikelihood()

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_distill import examples

        return examples.SFT


# --- Collector --------------------------------------------------------------------------------------------------------


class ConversationsConfig(DriverConfig):
    loss_mask_type: Literal["assistant", "last_assistant"] = "assistant"
    """Which turns are trained: all turns of the assistant, or only the last one. A message with `step_loss_mask = 0` is never
    trained."""


class Conversations(CollectorDriver):
    """Responses from the data: the assistant's turns of a conversation, or the label of a prompt. No engine is started."""

    Config = ConversationsConfig

    @classmethod
    def build(cls, config: ConversationsConfig) -> Collector[RolloutContext]:
        from slime_distill import conversations

        return conversations.ConversationGroups(last_turn_only=config.loss_mask_type == "last_assistant")

    @classmethod
    def needs_engine(cls, config: ConversationsConfig) -> bool:
        return False

    @classmethod
    def reads_prompts(cls, config: ConversationsConfig) -> bool:
        return True

    @classmethod
    def problems(cls, config: ConversationsConfig, rollout: RolloutConfig) -> list[str]:
        found = []
        if rollout.n_samples_per_prompt != 1:
            found.append(
                f"rollout.n_samples_per_prompt = {rollout.n_samples_per_prompt}: a row of the data has one response. "
                "Pass --n-samples-per-prompt 1."
            )
        if rollout.filters:
            names = ", ".join(table.name for table in rollout.filters)
            found.append(f"rollout.filters ({names}): collector sft uses every row of the data. Leave the filters out.")
        return found

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        shape = {"n_samples_per_prompt": 1, "num_steps": 3}
        return [
            CollectorExample(**shape),
            CollectorExample(options={"loss_mask_type": "last_assistant"}, **shape),
        ]
