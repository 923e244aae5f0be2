"""Recipes: advantage, corrections, loss, KL and aggregation together, as the kernel runs them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from slime_core.algorithm.advantages import AdvantageConfig, compute_advantages_and_returns
from slime_core.algorithm.loss import MAX_LOG_RATIO, TokenObjective
from slime_core.config.algo import AlgoConfig
from slime_core.contracts.aggregation import Aggregation
from slime_core.contracts.example import ExampleSample
from slime_core.types.batch import Batch, Float64, TokenColumns
from slime_plugin_kit.batches import MAX_RESPONSE_LEN, ORDER, WHOLE, example_batch
from slime_plugin_kit.case import Case
from slime_plugin_kit.compare import require_same
from slime_plugin_kit.declared import with_declared_alone
from slime_plugin_kit.objectives import EVERY_NEED, everything_of, leaves_of, packed, train
from slime_plugin_kit.recipes import Dressed, dressed
from slime_plugin_kit.stub_loss import LogProbs
from slime_plugin_kit.trial import (
    Trial,
    require_any_context_parallel,
    require_any_micro_batches,
    require_any_order,
    require_any_shards,
    require_float32,
    require_same_step,
    require_true_gradient,
    require_zero_gradient,
    require_zero_with_graph,
)  # fmt: skip
from slime_training.segments import LocalSegments


@pytest.fixture
def trial() -> Trial:
    return Trial.fresh()


def steps(case: Case, trial: Trial) -> Iterator[tuple[TokenObjective, Trial]]:
    """Every role's objective under every dressing, with the batch as it is trained on."""
    for way in dressed(case):
        for role, objective in way.objectives():
            try:
                yield objective, way.credited(trial, role=role)
            except AssertionError as error:
                error.add_note(f"the {role}'s objective, {way.setting}")
                raise


# Rollout 0 is two samples with 1, 2, tool, and 3; rollout 1 has 4, 5, 6, 7; rollout 2 is fully masked.
WEIGHED = (
    ExampleSample(mask=(1, 1, 0), rollout=0, log_probs=(1.0, 2.0, 50.0)),
    ExampleSample(mask=(1,), rollout=0, log_probs=(3.0,)),
    ExampleSample(mask=(1, 1, 1, 1), rollout=1, log_probs=(4.0, 5.0, 6.0, 7.0)),
    ExampleSample(mask=(0, 0), rollout=2, log_probs=(50.0, 50.0)),
)
BY_HAND = {
    Aggregation.SEQ_MEAN: 2.5,  # (6/3 + 22/4 + 0) / 3 rollouts
    Aggregation.TOKEN_MEAN: 4.0,  # 28 / 7 tokens
    Aggregation.CONSTANT: 1.1666667,  # 28 / 8 (the longest response allowed) / 3 rollouts
}


def test_every_option_has_an_owner(case: Case) -> None:
    owned = set(AlgoConfig.model_fields)
    for part in case.algo.parts:
        owned |= set(type(part.config).model_fields)
    unowned = sorted(set(case.algo.recipe.options) - owned)
    assert not unowned, f"no part of the recipe has the option {', '.join(unowned)}, and neither has the kernel"


def test_aggregation_is_anchored_by_hand(case: Case, trial: Trial) -> None:
    (aggregation,) = {way.aggregation for way in dressed(case)}
    batch = example_batch(WEIGHED)
    rules = AdvantageConfig(advantage=None, aggregation=aggregation, rollouts_per_step=3, max_response_len=8)
    columns = compute_advantages_and_returns(batch, TokenColumns(), rules).columns
    objective = TokenObjective(loss=LogProbs(), needs=EVERY_NEED, report_entropy=False)
    log_probs = np.array([number for sample in WEIGHED for number in sample.log_probs or ()])
    policy = replace(trial.policy, log_probs=log_probs, entropy=0 * log_probs, values=0 * log_probs)
    got = train(objective, batch, columns, policy, [range(len(WEIGHED))])
    require_same(f"loss with aggregation {aggregation}", got.loss, BY_HAND[aggregation], tolerance=1e-6)


def test_loss_is_the_weighted_sum_of_its_parts(case: Case, trial: Trial) -> None:
    for way in dressed(case):
        credited = way.credited(trial)
        got = credited.train(way.actor())
        require_same(f"loss, {way.setting}", got.loss, sum_of_parts(way, credited), tolerance=1e-6)


def sum_of_parts(way: Dressed, trial: Trial) -> float:
    """The actor's loss, term by term, in float64."""
    algo, keys, objective = way.algo, way.algo.keys, way.actor()
    micro, _ = packed(trial.batch, trial.columns, np.arange(trial.batch.num_samples))
    segments = LocalSegments(micro.segments, micro.num_samples)
    inputs = everything_of(micro, leaves_of(trial.policy, objective, torch.float64))
    total = objective.loss(inputs, segments).values.detach().numpy()
    if trial.columns.correction is not None:
        total = total * trial.columns.correction
    for part in algo.corrections:
        if part.driver.in_loss:
            total = total * part.build().correct_loss(inputs, segments).weights.numpy()
    if keys.entropy_coef:
        total = total - keys.entropy_coef * trial.policy.entropy
    if algo.kl_loss is not None and keys.kl_loss_coef:
        assert trial.columns.ref_log_probs is not None
        assert trial.columns.old_log_probs is not None
        gap = np.clip(trial.policy.log_probs - trial.columns.old_log_probs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = torch.from_numpy(np.exp(gap)) if keys.use_unbiased_kl else None
        reference = torch.from_numpy(trial.columns.ref_log_probs.astype(np.float64))
        kl = algo.kl_loss.build()(torch.from_numpy(trial.policy.log_probs), reference, ratio).numpy()
        total = total + keys.kl_loss_coef * kl
    return float(np.dot(weights_by_loop(trial.batch, way.aggregation), np.where(trial.mask, total, 0.0)))


def weights_by_loop(batch: Batch, aggregation: Aggregation) -> Float64:
    """(M,), one sample after the other."""
    rollouts = sorted(set(batch.rollout_id.tolist()))
    trained = [int(count) for count in batch.num_trainable]
    weights = []
    for sample, length in enumerate(batch.response_length.tolist()):
        of_rollout = sum(
            n for n, rollout in zip(trained, batch.rollout_id, strict=True) if rollout == batch.rollout_id[sample]
        )
        weight = {
            Aggregation.SEQ_MEAN: 1 / max(of_rollout, 1) / len(rollouts),
            Aggregation.TOKEN_MEAN: 1 / sum(trained),
            Aggregation.CONSTANT: 1 / MAX_RESPONSE_LEN / len(rollouts),
        }[aggregation]
        weights += [weight] * length
    return np.array(weights)


def test_gradient_equals_finite_differences(case: Case, trial: Trial) -> None:
    for objective, credited in steps(case, trial):
        require_true_gradient(objective, credited)


def test_float32_agrees_with_float64(case: Case, trial: Trial) -> None:
    for objective, credited in steps(case, trial):
        require_float32(objective, credited)


def test_packing_and_order_change_nothing(case: Case, trial: Trial) -> None:
    moved = steps(case, trial.taken(ORDER))
    for (objective, credited), (_, other) in zip(steps(case, trial), moved, strict=True):
        require_any_order(objective, credited, other)


def test_micro_batches_change_nothing(case: Case, trial: Trial) -> None:
    for objective, credited in steps(case, trial):
        require_any_micro_batches(objective, credited)


def test_data_parallel_shards_change_nothing(case: Case, trial: Trial) -> None:
    for objective, credited in steps(case, trial):
        require_any_shards(objective, credited)


def test_context_parallel_shards_change_nothing(case: Case, trial: Trial) -> None:
    for objective, credited in steps(case, trial):
        require_any_context_parallel(objective, credited)


def test_masked_tokens_change_nothing(case: Case, trial: Trial) -> None:
    for (objective, clean), (_, dirty) in zip(steps(case, trial), steps(case, trial.poisoned()), strict=True):
        expected, got = clean.train(objective, WHOLE), dirty.train(objective, WHOLE)
        require_same_step("with NaN and infinity at masked tokens", got, expected, tolerance=1e-7)


def test_a_fully_masked_batch_gives_zero_with_a_graph(case: Case, trial: Trial) -> None:
    for objective, credited in steps(case, trial.masked()):
        require_zero_with_graph(objective, credited)


def test_zero_advantages_give_zero_gradient(case: Case, trial: Trial) -> None:
    way = dressed(case)[0]
    credited = way.credited(trial)
    zeros = np.zeros(len(trial.batch.mask), np.float32)
    without_terms = replace(way.actor(), kl=None, entropy_coef=0.0)
    require_zero_gradient(replace(credited, columns=replace(credited.columns, advantages=zeros)).train(without_terms))


def test_equal_rewards_give_zero_gradient(case: Case, trial: Trial) -> None:
    way = dressed(case)[0]
    equal = replace(trial, batch=replace(trial.batch, reward=np.full(trial.batch.num_samples, 0.3)))
    objective = replace(way.actor(), kl=None, entropy_coef=0.0)
    require_zero_gradient(way.credited(equal).train(objective))


def test_undeclared_inputs_are_not_needed(case: Case, trial: Trial) -> None:
    for way in dressed(case):
        declared = way.algo.needs
        given = replace(trial, columns=trial.columns.only({need.value for need in declared}))
        for (role, everything), (_, alone) in zip(way.objectives(), way.objectives(everything=False), strict=True):
            expected = way.credited(trial, role=role).train(everything)
            with with_declared_alone(declared) as which:
                got = way.credited(given, role=role, everything=False).train(alone)
            require_same(f"{role}'s loss {which}", got.loss, expected.loss, tolerance=0)
            for name, column in expected.gradient.items():
                require_same(f"gradient of the {name} {which}", got.gradient[name], column, tolerance=0)


def test_old_log_probs_may_be_the_current_ones(case: Case, trial: Trial) -> None:
    for way in dressed(case):
        assert trial.columns.old_log_probs is not None
        if not way.algo.old_is_current(steps_per_rollout=1):
            continue
        policy = replace(trial.policy, log_probs=trial.columns.old_log_probs.astype(np.float64))
        explicit = way.credited(replace(trial, policy=policy))
        implied = replace(explicit, columns=replace(explicit.columns, old_log_probs=None))
        got = implied.train(replace(way.actor(), old_from_current=True))
        require_same_step(f"{way.setting}, without a column of old log-probs", got, explicit.train(way.actor()), 1e-7)
