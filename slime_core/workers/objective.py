"""ObjectiveSpec: the loss as it travels to the ranks, where it is built from the parts again."""

from __future__ import annotations

from dataclasses import dataclass

from slime_core.config.bound import BoundAlgo, PartSpec
from slime_core.objective.loss import TokenObjective
from slime_core.registry import Registry
from slime_core.workers.agreement import Agreement


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSpec:
    """Parts by name, and the numbers that the kernel itself applies."""

    loss: PartSpec
    kl: PartSpec | None
    kl_loss_coef: float
    use_unbiased_kl: bool
    entropy_coef: float
    corrections: tuple[PartSpec, ...]
    old_from_current: bool
    old_from_rollout: bool

    @classmethod
    def of_actor(cls, algo: BoundAlgo, steps_per_rollout: int) -> ObjectiveSpec:
        keys = algo.keys
        return cls(
            loss=algo.loss.spec(),
            kl=None if algo.kl_loss is None else algo.kl_loss.spec(),
            kl_loss_coef=keys.kl_loss_coef,
            use_unbiased_kl=keys.use_unbiased_kl,
            entropy_coef=keys.entropy_coef,
            corrections=tuple(part.spec() for part in algo.corrections if part.driver.in_loss),
            old_from_current=algo.old_is_current(steps_per_rollout),
            old_from_rollout=keys.use_rollout_logprobs,
        )

    def build(self, agreement: Agreement, registry: Registry) -> TokenObjective:
        loss = agreement.resolve(self.loss, registry)
        corrections = [agreement.resolve(spec, registry) for spec in self.corrections]
        return TokenObjective(
            loss=loss.build(),
            needs=frozenset(loss.driver.needs),
            reads_values=loss.driver.trains_values,
            old_from_current=self.old_from_current,
            old_from_rollout=self.old_from_rollout,
            kl=None if self.kl is None else agreement.resolve(self.kl, registry).build(),
            kl_loss_coef=self.kl_loss_coef,
            use_unbiased_kl=self.use_unbiased_kl,
            entropy_coef=self.entropy_coef,
            corrections=[(part.build(), frozenset(part.driver.needs)) for part in corrections],
        )
