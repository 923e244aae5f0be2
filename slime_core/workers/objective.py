"""ObjectiveSpec: the loss as plain data for the ranks, which build it from its parts."""

from __future__ import annotations

from dataclasses import dataclass, fields

from slime_core.algorithm.loss import TokenObjective
from slime_core.config.part import BoundPlugin, PluginSpec
from slime_core.config.roles import BoundRole
from slime_core.registry import Registry
from slime_core.types.batch import TokenColumns
from slime_core.workers.agreement import Agreement


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSpec:
    """Parts by name, and the numbers that the kernel itself applies."""

    loss: PluginSpec
    kl: PluginSpec | None = None
    kl_loss_coef: float = 0.0
    use_unbiased_kl: bool = False
    entropy_coef: float = 0.0
    corrections: tuple[PluginSpec, ...] = ()
    old_from_current: bool = False
    old_from_rollout: bool = False

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


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherObjective:
    """Another loss for one call, alone: without the recipe's KL, entropy and corrections."""

    spec: ObjectiveSpec
    columns: frozenset[str]
    """Columns of `TokenColumns` that the loss gets beside advantages, returns and loss weights."""
    agreement: Agreement

    @classmethod
    def of(cls, loss: BoundPlugin, agreement: Agreement) -> OtherObjective:
        return cls(
            spec=ObjectiveSpec(loss=loss.spec()),
            columns=frozenset(need.value for need in loss.driver.needs) & {f.name for f in fields(TokenColumns)},
            agreement=agreement,
        )

    def build(self) -> TokenObjective:
        return self.spec.build(self.agreement, self.agreement.registry())
