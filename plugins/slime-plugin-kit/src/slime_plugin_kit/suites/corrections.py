"""Off-policy corrections, of the whole step (batch stage) or in the loss."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch

from slime_core.algorithm import advantages as credit
from slime_core.algorithm import loss
from slime_core.algorithm.loss import TokenObjective
from slime_core.contracts.example import CorrectionExample
from slime_core.contracts.loss import LossInputs
from slime_core.contracts.needs import Need
from slime_core.types.batch import Float64
from slime_plugin_kit.batches import ORDER, column_of, example_batch, example_columns, flat, is_given
from slime_plugin_kit.case import Case
from slime_plugin_kit.compare import require_same
from slime_plugin_kit.declared import with_declared_alone
from slime_plugin_kit.objectives import EVERY_NEED, everything_of, leaves_of, packed
from slime_plugin_kit.stub_loss import LogProbs
from slime_plugin_kit.trial import Trial, require_any_context_parallel, require_any_micro_batches
from slime_training.segments import LocalSegments

FLOAT32 = 1e-5


@pytest.fixture
def trial() -> Trial:
    return Trial.fresh()


@dataclass(frozen=True, kw_only=True, eq=False)
class Corrected:
    """(M,) each, float64."""

    weights: Float64
    """0 where the token is taken out."""
    metrics: dict[str, Float64]
    lively: tuple[str, ...] = ()
    """What carries a gradient."""


def objective_of(case: Case) -> TokenObjective:
    """The sum of weight x correction x log-prob."""
    return TokenObjective(
        loss=LogProbs(), needs=EVERY_NEED, report_entropy=False, corrections=[(case.build(), EVERY_NEED)]
    )


def corrected(case: Case, trial: Trial, needs: frozenset[Need] = EVERY_NEED) -> Corrected:
    return of_loss(case, trial, needs) if case.driver.in_loss else of_batch(case, trial, needs)


def of_batch(case: Case, trial: Trial, needs: frozenset[Need]) -> Corrected:
    batch, columns = credit.restrict_inputs(trial.batch, trial.columns, needs)
    got = case.build().correct_batch(batch, columns)
    shape = trial.batch.mask.shape
    for name, column in {"weights": got.weights, "keep": got.keep, **got.metrics}.items():
        assert column.shape == shape, f"{name} has shape {column.shape}, not {shape}"
    assert got.weights.dtype == np.float32, f"weights are {got.weights.dtype}, not float32"
    assert got.keep.dtype == np.bool_, f"keep is {got.keep.dtype}, not bool"
    return Corrected(
        weights=np.where(got.keep, got.weights, 0.0).astype(np.float64),
        metrics={name: np.asarray(column, np.float64) for name, column in got.metrics.items()},
    )


def of_loss(case: Case, trial: Trial, needs: frozenset[Need]) -> Corrected:
    micro, _ = packed(trial.batch, trial.columns, np.arange(trial.batch.num_samples))
    everything = everything_of(micro, leaves_of(trial.policy, objective_of(case), torch.float64))
    got = case.build().correct_loss(
        loss.restrict_inputs(everything, needs, False), LocalSegments(micro.segments, micro.num_samples)
    )
    shape = tuple(micro.mask.shape)
    for name, tensor in {"weights": got.weights, **got.metrics}.items():
        assert tensor.shape == shape, f"{name} has shape {tuple(tensor.shape)}, not {shape}"
    lively = [name for name, tensor in {"weights": got.weights, **got.metrics}.items() if tensor.requires_grad]
    return Corrected(
        weights=got.weights.detach().double().numpy(),
        metrics={name: tensor.detach().double().numpy() for name, tensor in got.metrics.items()},
        lively=tuple(lively),
    )


def test_anchored_by_hand(case: Case) -> None:
    anchors = [(of, example) for of in case.subject.cases for example in of.examples(CorrectionExample)]
    assert anchors, (
        "no numbers worked out by hand: give its driver a classmethod `examples` that returns a "
        "slime_core.contracts.example.CorrectionExample"
    )
    for of, example in anchors:
        batch = example_batch(example.samples)
        trained = batch.mask.astype(np.bool_)
        if case.driver.in_loss:
            names = [f.name for f in fields(LossInputs) if f.name != "mask" and is_given(example.samples, f.name)]
            given = {name: torch.tensor(column_of(example.samples, name)) for name in names}
            segments = LocalSegments(torch.from_numpy(batch.sample_of_token), batch.num_samples)
            inputs = LossInputs(mask=torch.from_numpy(trained), **given)
            weights = of.build().correct_loss(inputs, segments).weights.double().numpy()
        else:
            there = Trial(batch=batch, columns=example_columns(example.samples), policy=Trial.fresh().policy)
            weights = corrected(of, there).weights
        expected = flat(example.weights)[trained]
        require_same(f"weights with {of.label or 'its defaults'}", weights[trained], expected, tolerance=FLOAT32)


def test_weights_are_detached_and_finite(case: Case, trial: Trial) -> None:
    got = corrected(case, trial)
    assert not got.lively, f"{', '.join(got.lively)} carries a gradient: detach it"
    for name, column in {"weights": got.weights, **got.metrics}.items():
        assert np.isfinite(column[trial.mask]).all(), f"{name} is not finite at trained tokens"
    assert (got.weights[trial.mask] >= 0).all(), "a weight is negative: it would turn the gradient round"


def test_one_where_there_is_no_gap(case: Case, trial: Trial) -> None:
    reported = trial.batch.rollout_log_probs
    columns = replace(trial.columns, old_log_probs=reported, ref_log_probs=reported)
    policy = replace(trial.policy, log_probs=reported.astype(np.float64))
    got = corrected(case, replace(trial, columns=columns, policy=policy))
    ones = np.ones(int(trial.mask.sum()))
    require_same("weights where trainer and engine agree", got.weights[trial.mask], ones, tolerance=FLOAT32)


def test_masked_tokens_change_nothing(case: Case, trial: Trial) -> None:
    clean, dirty = corrected(case, trial), corrected(case, trial.poisoned())
    what = "with NaN and infinity at masked tokens: weights"
    require_same(what, dirty.weights[trial.mask], clean.weights[trial.mask], tolerance=1e-7)


def test_packing_and_order_change_nothing(case: Case, trial: Trial) -> None:
    rows = trial.batch.response_rows(np.array(ORDER))
    whole, other = corrected(case, trial), trial.taken(ORDER)
    got = corrected(case, other).weights[other.mask]
    require_same(f"weights of samples in the order {ORDER}", got, whole.weights[rows][other.mask], tolerance=FLOAT32)


def test_micro_batches_change_nothing(case: Case, trial: Trial) -> None:
    require_any_micro_batches(objective_of(case), trial)


def test_context_parallel_shards_change_nothing(case: Case, trial: Trial) -> None:
    require_any_context_parallel(objective_of(case), trial)


def test_odd_samples_are_harmless(case: Case, trial: Trial) -> None:
    for label, there in {
        "a fully masked step": trial.masked(),
        "a step of one empty response": trial.taken((4,)),
        "a step of one token": trial.taken((7,)),
    }.items():
        weights = corrected(case, there).weights[there.mask]
        assert np.isfinite(weights).all(), f"{label}: weights of trained tokens are {weights}"


def test_extreme_log_ratios_stay_finite(case: Case, trial: Trial) -> None:
    far = np.where(np.arange(len(trial.batch.mask)) % 2, 1e4, -1e4).astype(np.float32)
    for sign in (1, -1):
        reported = (trial.batch.rollout_log_probs + sign * far).astype(np.float32)
        there = replace(trial, batch=replace(trial.batch, rollout_log_probs=reported))
        weights = corrected(case, there).weights[there.mask]
        assert np.isfinite(weights).all(), f"log-ratios of ten thousand give the weights {weights}: clamp before exp"


def test_undeclared_inputs_are_not_needed(case: Case, trial: Trial) -> None:
    needs = frozenset(case.driver.needs)
    expected = corrected(case, trial)
    with with_declared_alone(needs) as label:
        got = corrected(case, trial, needs)
    require_same(f"weights {label}", got.weights[trial.mask], expected.weights[trial.mask], tolerance=0)


def test_declared_needs_are_read(case: Case, trial: Trial) -> None:
    unread = [n for n in sorted(case.driver.needs) if not any(reads(of, n, trial) for of in case.subject.cases)]
    assert not unread, f"{', '.join(unread)} changes nothing under any of its options: leave it out of `needs`"


def reads(case: Case, need: Need, trial: Trial) -> bool:
    before, after = corrected(case, trial), corrected(case, trial.moved(need))
    one, other = ({"weights": of.weights, **of.metrics} for of in (before, after))
    return any(not np.array_equal(one[name], other[name], equal_nan=True) for name in one)


def test_inputs_are_left_alone(case: Case, trial: Trial) -> None:
    given = {f.name: getattr(trial.columns, f.name) for f in fields(trial.columns)}
    given |= {"rollout_log_probs": trial.batch.rollout_log_probs, "mask": trial.batch.mask}
    columns = {name: column for name, column in given.items() if column is not None}
    before = {name: column.copy() for name, column in columns.items()}
    first = corrected(case, trial)
    written = [name for name, column in columns.items() if not np.array_equal(column, before[name])]
    assert not written, f"it writes into {', '.join(written)}"
    require_same("weights, called twice", corrected(case, trial).weights, first.weights, tolerance=0)
