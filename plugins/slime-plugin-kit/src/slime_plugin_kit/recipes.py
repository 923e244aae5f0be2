"""A recipe's parts as the kernel puts them together: the credit of the whole batch, and the objective of each role."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from slime_core.algorithm.advantages import AdvantageConfig, compute_advantages_and_returns
from slime_core.algorithm.loss import TokenObjective
from slime_core.config.bound import BoundAlgo
from slime_core.contracts.aggregation import Aggregation
from slime_core.contracts.needs import Need
from slime_plugin_kit.batches import MAX_RESPONSE_LEN, NUM_ROLLOUTS
from slime_plugin_kit.case import Case
from slime_plugin_kit.objectives import EVERY_NEED
from slime_plugin_kit.trial import Trial

ENTROPY_COEF: Final = 0.01
KL_LOSS_COEF: Final = 0.05
KL_COEF: Final = 0.1


@dataclass(frozen=True, kw_only=True, eq=False)
class Dressed:
    """A recipe under some settings of the kernel's own keys."""

    setting: str
    algo: BoundAlgo

    def rules(self, *, everything: bool = True, rollouts_per_step: int = NUM_ROLLOUTS) -> AdvantageConfig:
        """`everything`: parts get every column, not only those that they declare."""
        algo, keys = self.algo, self.algo.keys
        estimators = [
            (part.build(), EVERY_NEED if everything else frozenset(part.driver.needs)) for part in algo.estimators
        ]
        return AdvantageConfig(
            advantage=estimators[0][0] if estimators else None,
            advantage_needs=estimators[0][1] if estimators else frozenset(),
            advantage_terms=estimators[1:],
            shaping=[part.build() for part in algo.shaping],
            kl_reward=None if algo.kl_reward is None else algo.kl_reward.build(),
            kl_coef=keys.kl_coef,
            normalize_advantages=keys.normalize_advantages,
            corrections=[
                (part.build(), EVERY_NEED if everything else frozenset(part.driver.needs))
                for part in algo.corrections
                if not part.driver.in_loss
            ],
            aggregation=self.aggregation,
            rollouts_per_step=rollouts_per_step,
            max_response_len=MAX_RESPONSE_LEN,
        )

    @property
    def aggregation(self) -> Aggregation:
        return Aggregation.TOKEN_MEAN if self.algo.keys.calculate_per_token_loss else self.algo.keys.aggregation

    def actor(self, *, everything: bool = True) -> TokenObjective:
        algo, keys = self.algo, self.algo.keys

        def needs(driver: Any) -> frozenset[Need]:
            return EVERY_NEED if everything else frozenset(driver.needs)

        return TokenObjective(
            loss=algo.loss.build(),
            needs=needs(algo.loss.driver),
            reads_values=algo.loss.driver.trains_values,
            old_from_rollout=keys.use_rollout_logprobs,
            kl=None if algo.kl_loss is None else algo.kl_loss.build(),
            kl_loss_coef=keys.kl_loss_coef,
            use_unbiased_kl=keys.use_unbiased_kl,
            entropy_coef=keys.entropy_coef,
            corrections=[(part.build(), needs(part.driver)) for part in algo.corrections if part.driver.in_loss],
        )

    def objectives(self, *, everything: bool = True) -> Iterator[tuple[str, TokenObjective]]:
        """By role. A critic's loss stands alone."""
        yield "actor", self.actor(everything=everything)
        loss = self.algo.critic_loss
        if loss is not None:
            needs = EVERY_NEED if everything else frozenset(loss.driver.needs)
            yield "critic", TokenObjective(loss=loss.build(), needs=needs, reads_values=loss.driver.trains_values)

    def credited(self, trial: Trial, *, role: str = "actor", everything: bool = True) -> Trial:
        """With the advantages, corrections and weights that the recipe gives the batch."""
        scores = replace(trial.columns, advantages=None, returns=None, correction=None, loss_weight=None)
        columns = compute_advantages_and_returns(trial.batch, scores, self.rules(everything=everything)).columns
        return replace(trial, columns=columns if role == "actor" else replace(columns, correction=None))


def dressed(case: Case) -> list[Dressed]:
    """The recipe as it is, and with every term that it can have."""
    own = case.algo
    overrides: dict[str, Any] = {"entropy_coef": ENTROPY_COEF}
    if own.keys.kl_loss_type is not None:
        overrides |= {"kl_loss_coef": KL_LOSS_COEF, "use_unbiased_kl": True, "kl_coef": 0.0}
    ways: list[Mapping[str, Any]] = [{}, overrides]
    if own.advantage and own.advantage.driver.accepts_kl_penalty and own.keys.kl_reward_type is not None:
        ways.append({"kl_coef": KL_COEF, "kl_loss_coef": 0.0})
    return [
        Dressed(
            setting=", ".join(f"{key} = {value}" for key, value in way.items()) or "as it is", algo=case.bind_algo(way)
        )
        for way in ways
    ]
