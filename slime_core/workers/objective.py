"""ObjectiveSpec: the loss as plain data for the ranks, which build it from its parts."""

from __future__ import annotations

from dataclasses import dataclass

from slime_core.algorithm.loss import TokenObjective
from slime_core.config.part import PluginSpec
from slime_core.config.roles import BoundRole
from slime_core.registry import Registry
from slime_core.workers.agreement import Agreement


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSpec:
    """Parts by name, and the numbers that the kernel itself applies."""

    loss: PluginSpec
    kl: PluginSpec | None
    kl_loss_coef: float
    use_unbiased_kl: bool
    entropy_coef: float
    corrections: tuple[PluginSpec, ...]
    old_from_current: bool
    old_from_rollout: bool

    @classmethod
    def of(cls, role: BoundRole) -> ObjectiveSpec:
        terms = role.terms
        return cls(
            loss=role.loss.spec(),
            kl=None if terms.kl is None else terms.kl.spec(),
            kl_loss_coef=terms.kl_loss_coef,
            use_unbiased_kl=terms.use_unbiased_kl,
            entropy_coef=terms.entropy_coef,
            corrections=tuple(part.spec() for part in terms.corrections),
            old_from_current=terms.old_from_current,
            old_from_rollout=terms.old_from_rollout,
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
