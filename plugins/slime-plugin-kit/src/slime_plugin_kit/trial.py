"""Trial: a batch with everything computed, trained in one step, and what may not change that step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from slime_core.algorithm.loss import TokenObjective
from slime_core.contracts.needs import Need
from slime_core.types.batch import Batch, Bool, TokenColumns
from slime_plugin_kit.batches import (
    ORDER,
    SHARDS,
    SPLITS,
    WHOLE,
    Policy,
    fully_masked,
    poison_columns,
    poison_policy,
    poisoned,
    trial_batch,
    trial_columns,
    trial_policy,
)  # fmt: skip
from slime_plugin_kit.compare import require_same, require_same_sums
from slime_plugin_kit.differences import gradient_by_differences
from slime_plugin_kit.objectives import Micros, Trained, loss_of, train

ROUNDING = 1e-6
"""Columns are float32, so sums in another order differ by that much; nothing that is wrong differs by so little."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Trial:
    batch: Batch
    columns: TokenColumns
    policy: Policy

    @classmethod
    def fresh(cls) -> Trial:
        """The trial batch. All columns are there, so that only where it is asked does it matter what a part declares."""
        batch = trial_batch()
        columns = trial_columns(batch)
        return cls(batch=batch, columns=columns, policy=trial_policy(columns))

    @property
    def mask(self) -> Bool:
        """(M,)"""
        return self.batch.mask.astype(np.bool_)

    def taken(self, samples: Sequence[int]) -> Trial:
        """The trial with only these samples, in this order."""
        chosen = np.array(samples, np.int64)
        rows = self.batch.response_rows(chosen)
        return Trial(batch=self.batch.take(chosen), columns=self.columns.take(rows), policy=self.policy.take(rows))

    def poisoned(self) -> Trial:
        """NaN, infinities and huge numbers at masked tokens."""
        mask = self.mask
        reported = poisoned(self.batch.rollout_log_probs, mask)
        return Trial(
            batch=replace(self.batch, rollout_log_probs=reported),
            columns=poison_columns(self.columns, mask),
            policy=poison_policy(self.policy, mask),
        )

    def masked(self) -> Trial:
        """With nothing to train."""
        weight = np.zeros(len(self.batch.mask), np.float32)
        return replace(self, batch=fully_masked(self.batch), columns=replace(self.columns, loss_weight=weight))

    def without_masked(self) -> Trial:
        """The trial without masked tokens."""
        batch, kept = self.batch, self.mask
        of_response = np.repeat(np.arange(batch.num_samples), batch.response_length)
        tokens = []
        for sample in range(batch.num_samples):
            start, prompt = batch.token_offsets[sample], batch.prompt_length[sample]
            response = batch.tokens[start + prompt : batch.token_offsets[sample + 1]]
            tokens += [batch.tokens[start : start + prompt], response[kept[of_response == sample]]]
        rows = np.flatnonzero(kept)
        return Trial(
            batch=replace(
                batch,
                response_length=batch.num_trainable.astype(np.int32),
                tokens=np.concatenate(tokens),
                mask=batch.mask[kept],
                rollout_log_probs=batch.rollout_log_probs[kept],
                version=batch.version[kept],
            ),
            columns=self.columns.take(rows),
            policy=self.policy.take(rows),
        )

    def moved(self, need: Need) -> Trial:
        """With other numbers in the column of this need."""
        noise = np.random.default_rng(5).normal(size=len(self.batch.mask))
        if need is Need.ROLLOUT_LOGPROBS:
            reported = (self.batch.rollout_log_probs + noise).astype(np.float32)
            return replace(self, batch=replace(self.batch, rollout_log_probs=reported))
        column = (self.columns.present()[need.value] + noise).astype(np.float32)
        moved = replace(self, columns=replace(self.columns, **{need.value: column}))
        if need is Need.ENTROPY:
            # In a loss it is the trained policy's.
            return replace(moved, policy=replace(self.policy, entropy=self.policy.entropy + noise))
        return moved

    def train(
        self,
        objective: TokenObjective,
        micros: Micros = WHOLE,
        *,
        cp_size: int = 1,
        dtype: torch.dtype = torch.float64,
    ) -> Trained:
        return train(objective, self.batch, self.columns, self.policy, micros, cp_size=cp_size, dtype=dtype)


def require_same_step(what: str, got: Trained, expected: Trained, tolerance: float = ROUNDING) -> None:
    """Loss, metrics and gradients."""
    require_same(f"{what}: loss", got.loss, expected.loss, tolerance=tolerance)
    require_same_sums(what, got.sums, expected.sums, tolerance=tolerance)
    for name, gradient in expected.gradient.items():
        require_same(f"{what}: gradient of the {name}", got.gradient[name], gradient, tolerance=tolerance)


def require_true_gradient(objective: TokenObjective, trial: Trial) -> None:
    got = trial.train(objective)
    for name, gradient in got.gradient.items():
        function, at = loss_of(objective, trial.batch, trial.columns, trial.policy, name)
        expected = gradient_by_differences(function, at).numpy()
        require_same(f"gradient of the {name} beside finite differences", gradient, expected, tolerance=ROUNDING)
        if name != "entropy":
            assert np.abs(gradient[trial.mask]).max() > 1e-5, f"the gradient of the {name} is zero at every token"


def require_float32(objective: TokenObjective, trial: Trial) -> None:
    exact, got = trial.train(objective), trial.train(objective, dtype=torch.float32)
    require_same("loss in float32", got.loss, exact.loss, tolerance=1e-4)
    for name, gradient in exact.gradient.items():
        require_same(f"gradient of the {name} in float32", got.gradient[name], gradient, tolerance=1e-4)


def require_any_order(objective: TokenObjective, trial: Trial, other: Trial) -> None:
    """`other` is the trial in ORDER."""
    whole = trial.train(objective)
    rows = trial.batch.response_rows(np.array(ORDER))
    expected = replace(whole, gradient={name: column[rows] for name, column in whole.gradient.items()})
    require_same_step(f"samples in the order {ORDER}", other.train(objective), expected)


def require_any_micro_batches(objective: TokenObjective, trial: Trial) -> None:
    whole = trial.train(objective)
    for split in SPLITS:
        require_same_step(f"micro-batches of samples {split}", trial.train(objective, split), whole)


def require_any_shards(objective: TokenObjective, trial: Trial) -> None:
    whole = trial.train(objective)
    loss, sums = 0.0, dict.fromkeys(whole.sums, 0.0)
    gradient = {name: np.zeros_like(column) for name, column in whole.gradient.items()}
    for samples, micros in SHARDS:
        part = trial.taken(samples).train(objective, micros)
        loss += part.loss
        sums = {name: sums.get(name, 0.0) + value for name, value in part.sums.items()}
        for name, column in part.gradient.items():
            gradient[name][trial.batch.response_rows(np.array(samples))] += column
    require_same_step("two data-parallel ranks", Trained(loss=loss, sums=sums, gradient=gradient), whole)


def require_any_context_parallel(objective: TokenObjective, trial: Trial) -> None:
    whole = trial.train(objective)
    for cp_size in (2, 3):
        got = trial.train(objective, SPLITS[2], cp_size=cp_size)
        require_same_step(f"{cp_size} context-parallel ranks", got, whole)


def require_zero_with_graph(objective: TokenObjective, trial: Trial, micros: Micros = WHOLE) -> None:
    got = trial.train(objective, micros)
    assert got.loss == 0.0, f"the loss is {got.loss}"
    require_zero_gradient(got)


def require_zero_gradient(got: Trained) -> None:
    for name, column in got.gradient.items():
        largest = np.abs(column).max(initial=0.0)
        assert largest == 0.0, f"the gradient of the {name} reaches {largest:.3g}"
