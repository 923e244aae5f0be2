"""The kernel's own keys of the `algo` table. Keys of a part (eps_clip, gamma, …) are options of that part."""

from __future__ import annotations

from pydantic import Field

from slime_core.config.plugin_table import PluginTable
from slime_core.contracts.aggregation import Aggregation
from slime_core.contracts.table import Table


class AlgoConfig(Table):
    """A recipe with the overrides of the run file."""

    advantage: PluginTable | None = None
    """Advantage estimator; none for a loss that uses no advantages."""
    advantage_terms: tuple[PluginTable, ...] = ()
    """Further estimators, whose advantages are added to the first one's before whitening; returns stay the first one's."""
    loss: PluginTable
    """Policy loss."""
    critic_loss: PluginTable | None = None
    """Loss of the critic role, if the recipe has one."""
    num_critic_only_steps: int = Field(0, ge=0)
    """Rollout steps at the start that train the critic alone; the policy version counts them too."""
    aggregation: Aggregation = Aggregation.SEQ_MEAN
    """How per-token values become the loss: seq_mean, token_mean or constant."""
    calculate_per_token_loss: bool = False
    """slime's name for aggregation token_mean; wins over the recipe's aggregation."""
    shaping: tuple[PluginTable, ...] = ()
    """Reward shapers, in order, before the advantage."""
    corrections: tuple[PluginTable, ...] = ()
    """Off-policy corrections, in order."""
    use_kl_loss: bool = False
    """Log the KL loss term even at coefficient 0; a non-zero kl_loss_coef implies it."""
    kl_loss_coef: float = Field(0.0, ge=0)
    """Weight of the KL term in the loss."""
    kl_loss_type: PluginTable | None = None
    """Estimator of the KL term in the loss; needed where there is one, and most recipes name it."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL penalty in the reward."""
    kl_reward_type: PluginTable | None = None
    """Estimator of the KL penalty in the reward; needed where kl_coef is not 0."""
    use_unbiased_kl: bool = False
    """Multiply the KL of the loss by exp(l - old), which keeps it unbiased off-policy."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    normalize_advantages: bool = False
    """Whiten advantages over the trainable tokens of the whole batch."""
    use_rollout_logprobs: bool = False
    """Use the engine's log-probs as the old log-probs."""
    true_on_policy_mode: bool = False
    """Engine and trainer compute with batch-invariant kernels: the engine's log-probs equal the trainer's bit for bit, and
    no forward computes old log-probs. Slower."""
    get_mismatch_metrics: bool = False
    """Recompute old log-probs for the trainer/engine gap metrics even when nothing else needs them."""

    @property
    def with_kl_loss(self) -> bool:
        return self.use_kl_loss or self.kl_loss_coef != 0.0
